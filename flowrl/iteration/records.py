"""Records that the stages of an iteration hand on, one each.

g draws of all processes, n samples of this process, k decision points, r rewards. A field is what
every sample has; what only a feature knows is a column of a record's `table`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.iteration.histograms import IterationValues
from flowrl.iteration.units import SamplingUnit, StoredSamples, UnitSamples
from flowrl.likelihoods.rows import Rows
from flowrl.likelihoods.token import TokenPolicy
from flowrl.models.policy import Batch, RolloutLike
from flowrl.processes.parallel import Parallel
from flowrl.prompts import Draws
from flowrl.table import EMPTY, Table
from rewards import Samples, Scores
from samplers import Velocity

ModelCall = Velocity | TokenPolicy  # what a likelihood evaluates: of images, of texts


@dataclass(frozen=True)
class DrawShare:
    """This process's part of some draws.

    count   draws of all processes
    mine    this process's indices in them
    counts  False if this process only repeats a draw, to make the same collective calls as others
    """

    count: int
    mine: range
    counts: bool


@dataclass(frozen=True)
class Drawn:
    """The prompts of an iteration, of all processes, and this process's part of them.

    shares  one for each round of draws; a budget may draw several
    by      name of the policy that samples
    """

    iteration: int
    draws: Draws
    shares: tuple[DrawShare, ...]
    by: str

    @classmethod
    def of(cls, parallel: Parallel, iteration: int, draws: Draws, by: str) -> "Drawn":
        """One round of draws."""
        count = len(draws.ids)
        return cls(iteration, draws, (DrawShare(count, *parallel.share(count)),), by)

    @property
    def counts(self) -> bool:
        """Whether any of this process's draws count."""
        return any(share.counts for share in self.shares)

    @property
    def indices(self) -> tuple[int, ...]:
        """This process's indices in the draws, round after round."""
        indices, first = list[int](), 0
        for share in self.shares:
            indices += [first + index for index in share.mine]
            first += share.count
        return tuple(indices)

    @property
    def unit(self) -> SamplingUnit:
        """This process's draws."""
        ids, rows, texts = self.draws.ids, self.draws.rows, self.draws.texts
        indices = self.indices
        return SamplingUnit(
            self.iteration,
            tuple(ids[index] for index in indices),
            tuple(rows[index] for index in indices),
            self.by,
            texts=tuple(texts[index] for index in indices) if texts else (),
        )

    def gatherer(self, parallel: Parallel) -> Callable[[Tensor], Tensor]:
        """A function that gathers a column [n ...] of this process's samples into that of all
        processes, in the order of the draws, on the CPU."""
        sizes = [len(share.mine) for share in self.shares]

        def gathered(column: Tensor) -> Tensor:
            per_draw = len(column) // sum(sizes)
            parts = column.split([size * per_draw for size in sizes])
            by_round = [
                parallel.gatherer(share.count)(part)
                for share, part in zip(self.shares, parts, strict=True)
            ]
            return by_round[0] if len(by_round) == 1 else torch.cat(by_round)

        return gathered

    def local(self, column: Any, group: int) -> Any:
        """This process's rows of a column over the samples of all processes."""
        parts, first = list[Any](), 0
        for share in self.shares:
            mine = share.mine
            parts.append(column[(first + mine.start) * group : (first + mine.stop) * group])
            first += share.count
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class Sampled:
    """This process's samples.

    batch    the encoded prompts, for the update
    unit     rollouts and decoded samples, by plan
    metrics  over all processes
    """

    drawn: Drawn
    batch: Batch
    unit: UnitSamples
    table: Table = EMPTY
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def rollouts(self) -> tuple[RolloutLike, ...]:
        return self.unit.rollouts


@dataclass(frozen=True)
class PlanScores:
    """Scores of one plan's samples.

    own       this process's
    everyone  of all processes, in the order of the draws
    totals    weighted sums of those over the rewards that apply [g * group]; NaN where one failed
              or none applies
    table     columns of this process's samples that credit reads
    """

    own: Scores
    everyone: Scores
    totals: Float[Tensor, " n"]
    table: Table = EMPTY


@dataclass(frozen=True)
class Scored:
    """Scores of an iteration's samples, by plan.

    samples  this process's, as pages show them
    scored   predicted or unfinished samples that this process scored besides
    reports  numbers that this process's rewards report on their calls
    metrics  over all processes
    """

    plans: tuple[PlanScores, ...]
    samples: tuple[Samples | StoredSamples, ...]
    scored: int = 0
    reports: Mapping[str, float] = field(default_factory=dict[str, float])
    table: Table = EMPTY
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class PlanCredit:
    """Advantages of one plan's samples of this process, on the CPU.

    table  columns of these samples that the loss reads
    """

    advantages: Float[Tensor, "n k"]
    mask: Bool[Tensor, "n k"]
    table: Table = EMPTY


@dataclass(frozen=True)
class Credited:
    plans: tuple[PlanCredit, ...]
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # over all processes


@dataclass(frozen=True)
class TrainingRows:
    """The rows of an iteration's update. Their `prompt` is an index into `draws` (ids), whose
    prompts `policy` has encoded.

    rows     one for each (rollout, trained step), or for each drawn noise level
    policy   the model's call with the current weights, for training
    prompts  of the draws, as rows of the prompt file
    frozen   evaluations without gradients that this process has made for credit
    metrics  of the iteration so far, over all processes
    """

    iteration: int
    rows: tuple[Rows, ...]
    draws: tuple[int, ...]
    policy: ModelCall
    prompts: tuple[int, ...] = ()
    frozen: int = 0
    table: Table = EMPTY
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Updated:
    """Optimizer steps on an iteration's rows.

    metrics  over all processes
    steps    number of optimizer steps, including skipped ones
    values   of all entries in the loss, if an observer shows them
    """

    metrics: dict[str, float]
    steps: int
    values: IterationValues | None = None


@dataclass(frozen=True)
class Iteration:
    """A finished iteration.

    number   iterations done, including this one
    metrics  of its line in `metrics.jsonl`, including alarms
    """

    number: int
    samples: Sampled
    scores: Scored
    credit: Credited
    rows: TrainingRows
    updated: Updated
    metrics: dict[str, float]
