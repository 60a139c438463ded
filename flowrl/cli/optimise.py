"""`flowrl sample --optimise`: search a better noise for each sample, instead of training.

gradient  the rewards' gradient through the decoder and all sampling steps into the noise, by
          Nesterov's momentum, and a term that keeps the noise's norm typical of a normal
          distribution: ReNO (arXiv:2406.04312), whose numbers are the defaults. Rewards need
          `differentiable`
search    random search around the best noise so far: for any pointwise reward
best      the best of several noises: for any pointwise reward

Several rewards are combined by their weights. Samples that are initially unscored are left out of
the printed averages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.cli.steer import SampleScorer
from flowrl.errors import UserError
from flowrl.likelihoods.pathwise import euler_path
from flowrl.models.diffusers.batch import Prompted
from flowrl.models.diffusers.call.results.decoder import sound_of
from rewards import Samples, score_all
from rewards.checks.differentiable import DifferentiableScore, differentiable_score
from rewards.checks.gradient_test import differentiable_scores
from rewards.types import per_of
from samplers import Velocity
from samplers.noise import cpu_noise

OptimiseMethod = Literal["gradient", "search", "best"]


@dataclass(frozen=True)
class NoiseSearch:
    """Settings of the search. `turn` is the share of new noise in a proposal of `search`, z' =
    sqrt(1 - turn^2) z + turn n, which keeps z' normal."""

    MOMENTUM: ClassVar[float] = 0.9
    CLIP: ClassVar[float] = 0.1  # of the gradient's norm, by sample
    method: OptimiseMethod
    rounds: int = 50
    rate: float = 5.0
    naturalness: float = 0.01
    turn: float = 0.3


@dataclass(frozen=True)
class NoiseScores:
    """Samples from initial noises, their scores, and the gradients of the scores."""

    scorer: SampleScorer
    conditioning: Prompted
    velocity: Velocity

    @classmethod
    def of(cls, scorer: SampleScorer) -> "NoiseScores":
        """Open the scorer. UserError for a pipeline that starts from an image."""
        trial, policy = scorer.trial, scorer.policy
        texts = [trial.prompts.texts[row] for row in trial.rows for _ in range(trial.group)]
        conditioning = policy.encode(texts)
        if policy.pictured(conditioning, trial.steps):
            raise UserError("--optimise needs a pipeline that starts from noise, not from an image")
        bound = policy.bind(conditioning, steps=trial.steps, guidance=scorer.guidance)
        return cls(scorer, conditioning, bound)

    def noise(self, *purpose: int | str) -> Float[Tensor, "n *d"]:
        """Keyed noise of each sample; "root" is the noise of a sample without optimisation."""
        trial, policy = self.scorer.trial, self.scorer.policy
        places = [(row, node) for row in trial.rows for node in range(trial.group)]
        keys = [(trial.seed, 0, row, *purpose, node) for row, node in places]
        drawn = cpu_noise(keys, policy.shape(trial.steps), policy.layout)
        return drawn.to(self.scorer.device, policy.arithmetic)

    def calls(self, n: int) -> Iterator[Tensor]:
        """Indices of the samples in each call."""
        yield from torch.arange(n).split(self.scorer.policy.sizes.sampling or n)

    def latents(self, z: Tensor, at: Tensor) -> Tensor:
        """Latents of the samples `at`, with gradients if they are enabled."""
        policy, steps = self.scorer.policy, self.scorer.trial.steps
        begin, prompt = policy.begin(self.conditioning, steps), at.to(z.device)
        x = z if begin is None else begin(z, prompt)
        sigmas = policy.schedule(steps).sigmas
        return policy.latents(euler_path(self.velocity, x, sigmas, prompt).x0, steps)

    @torch.no_grad()
    def samples(self, z: Tensor) -> Samples:
        x0 = torch.cat([self.latents(z[at], at) for at in self.calls(len(z))])
        return self.scorer.samples(x0, self.conditioning, torch.arange(len(z)))

    def score(self, z: Tensor) -> Float[Tensor, " n"]:
        """Weighted sum of the rewards that apply; -inf if one has no score, or none applies."""
        return self.scorer.score(self.samples(z)).nan_to_num(nan=-torch.inf)

    def slopes(self, z: Tensor) -> tuple[Float[Tensor, " n"], Float[Tensor, "n *d"]]:
        """Scores with gradients, and their gradients with respect to the noise."""
        rewards = graded_of(self.scorer)
        parts = [self._slope(z[at], at, rewards) for at in self.calls(len(z))]
        scores, slopes = zip(*parts, strict=True)
        return torch.cat(scores), torch.cat(slopes)

    def _slope(
        self, z: Tensor, at: Tensor, rewards: dict[str, DifferentiableScore]
    ) -> tuple[Tensor, Tensor]:
        """Compute the decoder's part first, so that its activations are freed before the network's
        exist."""
        trial, policy = self.scorer.trial, self.scorer.policy
        with torch.enable_grad():
            noise = z.detach().requires_grad_()
            x0 = self.latents(noise, at)
            part = x0.detach().requires_grad_()
            rows = self.conditioning.take(at)
            media = policy.decode(
                part, rows, steps=trial.steps, guidance=self.scorer.guidance, graded=True
            )
            if not media.requires_grad:
                raise UserError(
                    f"--optimise gradient: the decoder of {policy.name} has no gradient"
                )
            clean = media.detach()
            shown = self.scorer.shown(clean, at, sound_of(policy.sound_rate, clean))
            weights = self.scorer.weights
            scores = [
                weights[n] * differentiable_scores(n, r, media, shown).to(media)
                for n, r in rewards.items()
            ]
            score = torch.stack(scores).sum(0)
            (slope,) = torch.autograd.grad(score.sum(), part)
            (gradient,) = torch.autograd.grad(x0, noise, slope.to(x0))
        return score.detach(), gradient


def graded_of(scorer: SampleScorer) -> dict[str, DifferentiableScore]:
    """Rewards as differentiable functions. UserError, naming it, for one without a gradient."""
    try:
        return {name: differentiable_score(name, reward) for name, reward in scorer.rewards.items()}
    except ValueError as error:
        first = str(error).split(":")[0]
        raise UserError(
            f"--optimise gradient: {first} has no gradient: use --optimise search or best"
        ) from error


def optimised_samples(scorer: SampleScorer, how: NoiseSearch) -> tuple[Samples, str]:
    """Samples from the best noises, and a sentence about cost and gain. UserError for rewards that
    compare the samples of a group: each sample is scored alone."""
    for name, reward in scorer.rewards.items():
        if per_of(reward) == "group":
            raise UserError(
                f"--optimise {how.method}: {name} compares the samples of a group (per = 'group'), "
                "but each sample is scored alone here: leave it out, or use --steer best instead"
            )
    if how.method == "gradient":
        graded_of(scorer)  # before any sample is drawn
    scores = NoiseScores.of(scorer)
    noise = scores.noise("root")
    steps = len(noise) * scorer.trial.steps
    graded = how.method == "gradient"
    first, last, best = (_by_gradient if graded else _by_proposals)(scores, noise, how)
    again = 2 if scorer.trial.steps > 1 else 1  # several steps are evaluated twice
    work = steps * (1 + again * (how.rounds + 1) if graded else 2 + how.rounds)
    names = ", ".join(scorer.rewards)
    return scores.samples(best), (
        f"optimised for {names}: {first:.4g} -> {last:.4g} on average, {work} network evaluations"
    )


def _by_gradient(
    scores: NoiseScores, noise: Tensor, how: NoiseSearch
) -> tuple[float, float, Tensor]:
    z, speed = noise.clone(), torch.zeros_like(noise)
    top, best, first = torch.full((len(z),), -torch.inf), noise.clone(), 0.0
    for turn in range(how.rounds + 1):
        score, slope = scores.slopes(z)
        first = float(score.mean()) if turn == 0 else first
        better = score.cpu() > top
        top[better], best[better] = score.cpu()[better], z[better]
        gradient = naturalness_slope(z) * how.naturalness - slope.to(z)
        size = gradient.flatten(1).norm(dim=1).clamp(min=how.CLIP)
        gradient = gradient * (how.CLIP / size).view(-1, *[1] * (z.ndim - 1))
        speed = how.MOMENTUM * speed + gradient
        z = z - how.rate * (gradient + how.MOMENTUM * speed)
    return first, float(top.mean()), best


def _by_proposals(
    scores: NoiseScores, noise: Tensor, how: NoiseSearch
) -> tuple[float, float, Tensor]:
    best, top = noise.clone(), scores.score(noise)
    scored, first = top.isfinite(), top.clone()
    if not scored.any():
        shown = scores.samples(noise)
        if bool(score_all(scores.scorer.rewards, shown).outside.all()):
            raise UserError(
                f"--optimise {how.method}: no reward applies to any of the first samples "
                f"({', '.join(scores.scorer.rewards)} returned None for each): give other prompts, "
                "or name a reward that returns a score for them"
            )
        raise UserError(
            f"--optimise {how.method}: {', '.join(scores.scorer.rewards)} scored none of the "
            "first samples. Each is scored alone, so groupwise rewards cannot be used: use "
            "--steer best instead"
        )
    for turn in range(how.rounds):
        fresh = scores.noise("proposal", turn)
        keep = (1 - how.turn**2) ** 0.5
        z = fresh if how.method == "best" else keep * best + how.turn * fresh
        score = scores.score(z)
        better = score > top
        top[better], best[better] = score[better], z[better]
    return float(first[scored].mean()), float(top[scored].mean()), best


def naturalness_slope(z: Float[Tensor, "n *d"]) -> Float[Tensor, "n *d"]:
    """Gradient of the negative log-density of a normal noise's norm, |z|^2 / 2 - (d - 1) log |z|,
    in float32 or better."""
    wide = z.to(torch.promote_types(z.dtype, torch.float32))
    squares = wide.flatten(1).square().sum(1).view(-1, *[1] * (z.ndim - 1))
    return wide - (z[0].numel() - 1) * wide / squares
