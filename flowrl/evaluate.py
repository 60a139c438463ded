"""Held-out scores: deterministic sampling, fixed noise, the rewards that training does not see."""

from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from torch import Tensor

from flowrl.models.pipeline import PipelinePolicy
from flowrl.prompts import PromptSet
from flowrl.session import EVALUATION, Session
from flowrl.statistics import image_statistics
from rewards import Reward, Samples, Scores, score_all
from samplers import Ode, roll
from samplers.noise import normal


@dataclass(frozen=True)
class Trial:
    """What an evaluation draws: `group` samples of each of some prompts, from keyed noise."""

    prompts: PromptSet
    rows: tuple[int, ...]
    group: int
    steps: int
    seed: int

    @classmethod
    def of(
        cls, prompts: PromptSet, samples: int, per_prompt: int, steps: int, seed: int
    ) -> "Trial":
        """About `samples` samples over as many prompts as leave `per_prompt` for each."""
        count = max(1, min(len(prompts), samples // per_prompt))
        rows = tuple(i * len(prompts) // count for i in range(count))
        return cls(prompts, rows, max(per_prompt, samples // count), steps, seed)

    def part(self, share: range) -> "Trial":
        return Trial(
            self.prompts, self.rows[share.start : share.stop], self.group, self.steps, self.seed
        )

    def noise(self, shape: tuple[int, ...]) -> Tensor:
        """The initial latents [n *shape]: what to hand to plain diffusers to paint the same."""
        keys = [(self.seed, 0, row, "root", g) for row in self.rows for g in range(self.group)]
        return normal(keys, shape)


def paint(policy: PipelinePolicy, trial: Trial, guidance: float, device: torch.device) -> Samples:
    """Samples of a trial under the policy's present weights."""
    texts = [trial.prompts.texts[row] for row in trial.rows]
    conditioning = policy.encode(texts)
    (rollout,) = roll(
        Ode(trial.group)(policy.schedule(trial.steps).sigmas, 0, trial.seed),
        policy.bind(conditioning, steps=trial.steps, guidance=guidance),
        policy.shape(trial.steps),
        trial.rows,
        seed=trial.seed,
        iteration=0,
        device=device,
    )
    at = rollout.prompt.cpu()
    media = policy.decode(rollout.x0, conditioning.take(at), steps=trial.steps, guidance=guidance)
    each = at.tolist()
    meta = [trial.prompts.meta[trial.rows[i]] for i in each]
    return Samples(media, [texts[i] for i in each], at, meta)


@dataclass(frozen=True)
class Evaluation:
    metrics: dict[str, float]  # means by reward over all processes, and statistics of the pictures
    samples: Samples  # this process's
    scores: Scores


def judge(rewards: dict[str, Reward], samples: Samples) -> Evaluation:
    scores = score_all(rewards, samples)
    values, scored, pictures = (
        torch.cat(gather_object([scores.values])),
        torch.cat(gather_object([scores.scored])),
        gather_object([image_statistics(samples.media, samples.group)]),
    )
    metrics = {
        name: float(values[:, i][scored[:, i]].double().mean())
        if scored[:, i].any()
        else float("nan")
        for i, name in enumerate(scores.names)
    }
    for name in pictures[0]:
        metrics[f"image/{name}"] = sum(p[name] for p in pictures) / len(pictures)
    return Evaluation(metrics, samples, scores)


def evaluate(session: Session) -> Evaluation | None:
    """The run's own evaluation, always the same noise; None for a run without held-out prompts."""
    e = session.run.evaluate
    if session.held_out is None:
        return None
    trial = Trial.of(session.held_out, e.samples, e.per_prompt, e.steps, e.seed)
    part = trial.part(session.mine(len(trial.rows)))
    with session.policies.using(evaluated(session)):
        samples = paint(session.policy, part, session.run.model.guidance.sample, session.device)
    return judge(dict(session.judges), samples)


def evaluated(session: Session) -> str:
    """The policy that evaluations and exports use."""
    return EVALUATION if session.run.evaluate.average is not None else "current"
