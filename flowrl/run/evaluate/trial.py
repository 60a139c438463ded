"""Samples of an evaluation from keyed noise, in slices of prompts, and workers that evaluate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.iteration.sample import decode_samples_of
from flowrl.iteration.units import StoredSamples, all_samples, all_statistics
from flowrl.media.statistics import Statistics
from flowrl.models.call_sizes import bounded_call
from flowrl.models.policy import EvaluationSampler, RolloutLike
from flowrl.prompts import PromptSet
from flowrl.prompts.prompt_set import evaluated_rows
from flowrl.session.policies import NamedWeights
from flowrl.settings.model.environment import ONE_CREDIT
from rewards import Samples, Scores
from samplers.completions import TextRollout, TurnPoints
from samplers.noise import normal


@dataclass(frozen=True)
class Trial:
    """Samples of an evaluation: `group` per prompt, from keyed noise."""

    prompts: PromptSet
    rows: tuple[int, ...]
    group: int
    steps: int
    seed: int

    @classmethod
    def of(
        cls, prompts: PromptSet, samples: int, per_prompt: int, steps: int, seed: int
    ) -> "Trial":
        """A trial with about `samples` samples spread over prompts, with at least `per_prompt`
        each."""
        rows = evaluated_rows(len(prompts), samples, per_prompt)
        return cls(prompts, rows, max(per_prompt, samples // len(rows)), steps, seed)

    def part(self, share: range) -> "Trial":
        return replace(self, rows=self.rows[share.start : share.stop])

    def cut(self, size: int | None) -> "list[Trial]":
        """Cut into slices of `size` prompts, the last of which may have fewer. None: one slice."""
        count = len(self.rows)
        if size is None or size >= count:
            return [self]
        return [self.part(range(at, at + size)) for at in range(0, count, size)]

    def noise(self, shape: tuple[int, ...]) -> Tensor:
        """Initial latents [n *shape]. Plain diffusers generates the same images from them."""
        keys = [(self.seed, 0, row, "root", g) for row in self.rows for g in range(self.group)]
        return normal(keys, shape)


class TrialSamples(NamedTuple):
    samples: Samples
    statistics: Statistics  # of their media


class StoredTrial(NamedTuple):
    """As `TrialSamples`, with media that stay on workers."""

    samples: StoredSamples
    statistics: Statistics


class ScoredTrial(NamedTuple):
    """Samples of a trial with their scores, and further columns [n] by name."""

    drawn: TrialSamples | StoredTrial
    scores: Scores
    more: Mapping[str, Tensor]

    @classmethod
    def joined(cls, slices: Sequence[Trial], parts: "Sequence[ScoredTrial]") -> "ScoredTrial":
        """Join the slices of a share, in order."""
        if len(parts) == 1:
            return parts[0]
        placed, first = list[Samples | StoredSamples](), 0
        for trial_slice, part in zip(slices, parts, strict=True):
            samples = part.drawn.samples
            placed.append(replace(samples, group=samples.group + first))
            first += len(trial_slice.rows)
        samples = all_samples(placed)
        statistics = all_statistics([part.drawn.statistics for part in parts])
        more = {name: torch.cat([part.more[name] for part in parts]) for name in parts[0].more}
        kind = TrialSamples if isinstance(samples, Samples) else StoredTrial
        trial: Any = kind(samples, statistics)  # type: ignore[arg-type]
        return cls(trial, Scores.joined([part.scores for part in parts]), more)


@runtime_checkable
class AskedTrial(Protocol):
    """An evaluation that workers were asked for.

    weights  that are evaluated
    waited   seconds that this process has waited for it
    """

    weights: NamedWeights
    waited: float

    def parts(self) -> list[ScoredTrial]:
        """Wait for the results of all slices, in order."""
        ...


@runtime_checkable
class TrialSource(Protocol):
    """Workers that evaluate."""

    def ask(self, slices: list[Trial], iteration: int) -> AskedTrial:
        """Ask for an evaluation of the present weights, with which an iteration will begin."""
        ...


def draw_trial(policy: EvaluationSampler, trial: Trial, by_turn: bool = True) -> TrialSamples:
    """Sample a trial with the policy's current weights. UserError for an environment's rewards of
    single turns, unless the recipe credits turns, `by_turn`."""
    batch = policy.open(*trial.prompts.take(trial.rows), trial.steps)
    plan = policy.plain(trial.group)
    with bounded_call("sampling"):
        (rollout,) = batch.rollouts(plan, trial.rows, seed=trial.seed, iteration=0)
    refuse_turn_rewards(rollout, by_turn)
    samples = decode_samples_of(batch, rollout, trial.prompts, trial.rows, "the evaluation")
    return TrialSamples(samples, batch.statistics(rollout, samples.media))


def refuse_turn_rewards(rollout: RolloutLike, by_turn: bool) -> None:
    """UserError for an environment's rewards of single turns if all turns share one credit."""
    points = rollout.points if isinstance(rollout, TextRollout) else None
    if isinstance(points, TurnPoints) and not by_turn and not points.rewards.isnan().all():
        raise UserError(ONE_CREDIT)
