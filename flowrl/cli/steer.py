"""`flowrl sample --steer`: use more network evaluations instead of training, with any reward."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.errors import UserError, terminal_text
from flowrl.models.diffusers.batch import Driven, Prompted
from flowrl.run.evaluate.evaluate import Trial
from flowrl.settings import RewardSpec
from rewards import Reward, Samples, Scores, score_all
from rewards.audio import Audio
from samplers import Chain, FlowSDE, Latents, Ode, roll
from samplers.routes.particles import FeynmanKac
from samplers.routes.steering import best, importance, steer_plan

Method = Literal["best", "importance", "particles"]


@dataclass(frozen=True)
class SteeredSampler:
    """Selects one of `particles` samples by the weighted sum of rewards.

    best         the highest
    importance   drawn with weights exp(strength * reward)
    particles    Feynman-Kac: resampled before every second step with weights exp(strength * reward)
                 of the predicted image; at the end the highest (arXiv:2501.06848)
    """

    method: Method
    particles: int = 8
    strength: float = 10.0
    eta: float = 0.7


def drivable(policy: Any, option: str = "--steer") -> Driven:
    """The policy, if it has steps. UserError, naming the option, for a language model."""
    if not isinstance(policy, Driven):
        raise UserError(f"{option} is only for images and videos: leave it out, or raise --count")
    return policy


def last_weights(specs: Sequence[RewardSpec], iterations: int = 0) -> dict[str, float]:
    """Weights of the rewards at the run's last iteration."""
    return {spec.label: spec.weight_at(iterations) for spec in specs}


@dataclass(frozen=True)
class SampleScorer:
    """Decodes and scores the samples of one trial."""

    policy: Driven
    rewards: dict[str, Reward]
    weights: Mapping[str, float]
    trial: Trial
    guidance: float | None
    device: torch.device

    def samples(self, x0: Tensor, conditioning: Prompted, prompt: Tensor) -> Samples:
        """Decoded samples of clean latents [n *d]; `prompt` [n] are indices of the trial's
        samples."""
        at = prompt.cpu()
        decoded = self.policy.decoded(
            x0, conditioning.take(at), steps=self.trial.steps, guidance=self.guidance
        )
        return self.shown(decoded.media, at, decoded.audio)

    def shown(self, media: Tensor, at: Tensor, audio: Audio | None = None) -> Samples:
        """Decoded media of the trial's samples `at`, with their prompts."""
        rows = [self.trial.rows[i // self.trial.group] for i in at.tolist()]
        prompts, meta = self.trial.prompts.texts, self.trial.prompts.meta
        return Samples(media, [prompts[r] for r in rows], at, [meta[r] for r in rows], audio)

    def score(self, samples: Samples) -> Tensor:
        """Weighted sum of the rewards that apply [n]; NaN if one has no score, or none applies."""
        return self.totals(score_all(self.rewards, samples))

    def totals(self, scores: Scores) -> Tensor:
        """Weighted sums of scores [n], NaN as in `score`."""
        weights = scores.values.new_tensor([self.weights[name] for name in scores.names])
        return scores.totals(weights)


def say_unscored(scores: Scores, texts: Sequence[str], particles: int) -> None:
    """Print what has no total among `particles` samples of each text, before one of them is chosen.
    UserError for a reward that applies to samples and scored none of them."""
    n = len(scores.values)
    for name, missing in scores.unscored.items():
        if missing and missing == int(scores.column(name).applies.sum()):
            raise UserError(
                f"--steer: the reward {name} scored none of the {missing} samples to which it "
                "applies; fix the reward or its settings"
            )
    outside, failed = int(scores.outside.sum()), int((~scores.complete & ~scores.outside).sum())
    clauses = [f"no reward applies to {outside} of the {n} samples"] if outside else []
    clauses += [f"{failed} of the {n} samples have no score"] if failed else []
    if not clauses:
        return
    chosen = scores.complete.view(-1, particles).any(1).tolist()
    without = [text for text, has_total in zip(texts, chosen, strict=True) if not has_total]
    listed = ", ".join(repr(text[:50]) for text in dict.fromkeys(without))
    way = "they are not chosen"
    if without:
        way = f"one is chosen only where all are such, as for {listed[:200]}"
    print(terminal_text(f"warning: --steer: {'; '.join(clauses)}: {way}"), file=sys.stderr)


def steered_samples(scorer: SampleScorer, how: SteeredSampler) -> tuple[Samples, int]:
    """One selected sample per sample of the trial, and the number of network evaluations. UserError
    for a reward that applies to samples and scored none of them."""
    trial, policy = scorer.trial, scorer.policy
    texts = [trial.prompts.texts[row] for row in trial.rows for _ in range(trial.group)]
    conditioning = policy.encode(texts)
    if policy.pictured(conditioning, trial.steps):
        raise UserError("--steer needs a pipeline that starts from noise, not from an image")
    sigmas, shape = policy.schedule(trial.steps).sigmas, policy.shape(trial.steps)
    velocity = policy.bind(conditioning, steps=trial.steps, guidance=scorer.guidance)
    policy.fitted(Ode()(sigmas, 0, trial.seed), trial.steps)  # refuses a scheduler's own steps
    draws = range(len(texts))
    begin = policy.begin(conditioning, trial.steps)
    held = policy.held(conditioning, trial.steps)
    parts = policy.layout
    latents = Latents(shape, scorer.device, begin=begin, held=held, layout=parts)
    if how.method == "particles":
        if policy.schedule(trial.steps).clock is not None:
            raise UserError(
                f"--steer particles predicts clean samples in the middle, and {policy.name} steps "
                "parts of its state at levels of their own: use --steer best"
            )
        (plan,) = Chain(FlowSDE(how.eta), how.particles)(sigmas, 0, trial.seed)
        kernel = FeynmanKac(tuple(range(1, trial.steps - 1, 2)), how.strength)

        def score(x0: Tensor, prompt: Tensor) -> Tensor:
            return scorer.score(scorer.samples(x0, conditioning, prompt))

        result = steer_plan(kernel, plan, velocity, score, latents, draws, seed=trial.seed)
        x0, prompt = result.x0, result.prompt
    else:
        (plan,) = Ode(how.particles)(sigmas, 0, trial.seed)
        (rollout,) = roll((plan,), velocity, latents, draws, seed=trial.seed, iteration=0)
        x0, prompt = rollout.x0, rollout.prompt
    x0 = policy.latents(x0, trial.steps)
    all_scores = score_all(scorer.rewards, scorer.samples(x0, conditioning, prompt))
    say_unscored(all_scores, texts, how.particles)
    scores = scorer.totals(all_scores)
    if how.method == "importance":
        keys = [(trial.seed, 0, draw) for draw in draws]
        chosen = importance(scores, how.strength, keys)
    else:
        chosen = best(scores, how.particles)
    chosen = chosen.to(x0.device)
    return scorer.samples(x0[chosen], conditioning, prompt[chosen]), plan.evaluations * len(texts)
