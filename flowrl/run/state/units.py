"""Units: whole draws that are encoded, sampled, decoded and scored in calls of their own.

A sample's noise belongs to its draw, so that where a unit is sampled changes nothing, and how draws
are cut into units changes numbers by rounding only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from flowrl.media.statistics import Statistics
from flowrl.models.policy import RolloutLike
from flowrl.prompts import Draws
from rewards import Samples, Scores


@dataclass(frozen=True)
class SamplingUnit:
    """Draws of an iteration: their ids, and their rows of the prompt file. `first` is the place of
    the first one among the process's draws, `by` the policy that samples them: None is the
    algorithm's own."""

    iteration: int
    ids: tuple[int, ...]
    rows: tuple[int, ...]
    first: int = 0
    by: str | None = None

    def cut(self, size: int) -> "list[SamplingUnit]":
        """Cut into units of `size` draws; the last one may have fewer."""
        starts = range(0, len(self.ids), size)
        parts = [(at, slice(at, at + size)) for at in starts]
        return [replace(self, ids=self.ids[s], rows=self.rows[s], first=at) for at, s in parts]


@dataclass(frozen=True)
class UnitSamples:
    """Samples of a unit, by plan.

    looked       intermediate samples that were scored: to steer, to guide, or for credit
    evaluations  evaluations of the network, as `Meter` counts them
    reports      numbers that rewards report of their calls, where another process made these
    """

    rollouts: tuple[RolloutLike, ...]
    samples: tuple[Samples, ...]
    scores: tuple[Scores, ...]
    statistics: Statistics  # of the first plan's samples
    looked: int
    evaluations: int
    reports: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class UnitSource(Protocol):
    """Samples units elsewhere than in the training process."""

    def begin(self, iteration: int) -> None:
        """Note the weights with which an iteration begins, and start what may be sampled of them:
        the draws of the iteration that is `workers.lag` later."""
        ...

    def draws(self, iteration: int) -> Draws | None:
        """The draws of an iteration that was started; None for another one."""
        ...

    def samples(self, units: list[SamplingUnit], seconds: dict[str, float]) -> list[UnitSamples]:
        """Wait for the samples of an iteration's units, in order. Adds the time of each phase of
        the workers to `seconds`, and the time of waiting."""
        ...

    def state(self, iteration: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a checkpoint after so many iterations keeps: numbers, and weights."""
        ...

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None: ...

    def close(self) -> None: ...
