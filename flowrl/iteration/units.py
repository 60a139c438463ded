"""Units: whole draws that are encoded, sampled, decoded and scored in their own calls.

A sample's noise belongs to its draw, so results do not depend on where a unit is sampled, and
depend on the cut into units only by rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.media.statistics import Statistics, merged_means
from flowrl.models.policy import RolloutLike
from flowrl.prompts import Draws, PromptSet
from flowrl.table import EMPTY, Column, Table
from rewards import Samples, Scores
from rewards.audio import Audio
from samplers import Rollout
from samplers.completions import TextRollout
from samplers.host import on_host
from samplers.slices import DrawsSlice, joined_rollout, joined_texts, placed_rollout

LAG = "workers/lag"  # the metric: iterations between the weights that sampled and those trained


@dataclass(frozen=True)
class SamplingUnit:
    """Draws of an iteration: their ids and their rows of the prompt file. `first` is the index of
    its first draw among the process's draws, `texts` are as in `Draws`, and `by` is the policy that
    samples them."""

    iteration: int
    ids: tuple[int, ...]
    rows: tuple[int, ...]
    by: str
    first: int = 0
    texts: tuple[str, ...] = ()

    def cut(self, size: int) -> "list[SamplingUnit]":
        """Cut into units of `size` draws; the last unit may have fewer."""
        starts = range(0, len(self.ids), size)
        parts = [(at, slice(at, at + size)) for at in starts]
        return [
            replace(self, ids=self.ids[s], rows=self.rows[s], first=at, texts=self.texts[s])
            for at, s in parts
        ]


@dataclass(frozen=True)
class StoredSamples:
    """Samples whose media stay on their workers. `take` fetches the samples that are shown here.

    parts  number of samples, and a function that fetches them, per unit
    """

    parts: tuple[tuple[int, Callable[[], Samples]], ...]
    prompts: Sequence[str]
    group: Tensor
    meta: Sequence[Mapping[str, Any]]
    kind: str

    @classmethod
    def of(
        cls,
        rollout: RolloutLike,
        prompts: PromptSet,
        rows: Sequence[int],
        kind: str,
        bring: Callable[[], Samples],
    ) -> "StoredSamples":
        """A unit's samples; `rows` are those of its draws in the prompt file."""
        group = on_host(rollout.prompt)
        texts, meta = prompts.take([rows[i] for i in group.tolist()])
        return cls(((len(group), bring),), texts, group, meta, kind)

    @classmethod
    def joined(cls, parts: "Sequence[StoredSamples]") -> "StoredSamples":
        return cls(
            tuple(part for stored in parts for part in stored.parts),
            [text for stored in parts for text in stored.prompts],
            torch.cat([stored.group for stored in parts]),
            [row for stored in parts for row in stored.meta],
            parts[0].kind,
        )

    def on_cpu(self) -> "StoredSamples":
        return self

    def take(self, rows: Sequence[int]) -> Samples:
        """Samples of these rows, in this order."""
        media, sounds, first = dict[int, Any](), dict[int, Audio](), 0
        for count, bring in self.parts:
            rows_inside = {row - first for row in rows if first <= row < first + count}
            brought = bring() if rows_inside else None
            if brought is not None:
                media |= {first + i: brought.media[i] for i in rows_inside}
            if brought is not None and brought.audio is not None:
                sounds |= {first + i: brought.audio.take([i]) for i in rows_inside}
            first += count
        items = [media[row] for row in rows]
        tensors = [item for item in items if isinstance(item, Tensor)]
        same = len(tensors) == len(rows) and len({tensor.shape for tensor in tensors}) == 1
        batch = torch.stack(tensors) if same and tensors else items
        group = self.group[torch.tensor([*rows], dtype=torch.long)]
        meta = [self.meta[row] for row in rows] if self.meta else ()
        audio = Audio.joined([sounds[row] for row in rows]) if sounds else None
        return Samples(batch, [self.prompts[row] for row in rows], group, meta, audio)


@dataclass(frozen=True)
class UnitScores:
    """Scores of a unit's samples, by plan.

    samples  as pages show them, with their media in host memory
    scored   number of predicted or unfinished samples that were scored besides
    reports  numbers that rewards report on their calls, if another process made the calls
    """

    plans: tuple[Scores, ...]
    samples: tuple[Samples | StoredSamples, ...]
    scored: int = 0
    reports: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class UnitSamples:
    """Samples of a unit, by plan.

    samples      decoded
    statistics   of the first plan's samples
    evaluations  evaluations of the network, as counted by `Meter`
    scored       predicted samples that were scored to steer or to guide
    table        columns of features
    """

    rollouts: tuple[RolloutLike, ...]
    samples: tuple[Samples | StoredSamples, ...]
    statistics: Statistics
    evaluations: int
    scored: int = 0
    table: Table = EMPTY


EARLY: Column[UnitScores] = Column("scores that were made while sampling", "sample", "whole")
"""Of units that are scored where they are sampled: on a GPU, beside rewards that are waited for, on
workers, and where turns have rewards of their own."""


def joined_units(
    units: Sequence[SamplingUnit],
    sampled: Sequence[tuple[UnitSamples, UnitScores]],
    join: Callable[[Sequence[SamplingUnit], Sequence[RolloutLike]], RolloutLike],
) -> UnitSamples:
    """The samples of all units of a share, by plan, with their scores as `EARLY`.

    `join` joins the rollouts of one plan.
    """
    samples, scores = [unit for unit, _ in sampled], [unit_scores for _, unit_scores in sampled]
    by_plan = [
        all_samples([_placed(part, unit.first) for unit, part in zip(units, parts, strict=True)])
        for parts in zip(*(unit_scores.samples for unit_scores in scores), strict=True)
    ]
    scores_by_plan = UnitScores(
        tuple(Scores.joined(parts) for parts in zip(*(s.plans for s in scores), strict=True)),
        tuple(by_plan),
        sum(unit_scores.scored for unit_scores in scores),
        added([unit_scores.reports for unit_scores in scores]),
    )
    return UnitSamples(
        tuple(join(units, parts) for parts in zip(*(s.rollouts for s in samples), strict=True)),
        tuple(by_plan),
        all_statistics([unit_samples.statistics for unit_samples in samples]),
        sum(unit_samples.evaluations for unit_samples in samples),
        sum(unit_samples.scored for unit_samples in samples),
        EMPTY.with_value(EARLY, scores_by_plan),
    )


def joined_rollouts(units: Sequence[SamplingUnit], parts: Sequence[RolloutLike]) -> RolloutLike:
    """The rollouts of all units of a share, under one plan."""
    draws = tuple(draw for unit in units for draw in unit.ids)
    placed = [
        placed_rollout(part, DrawsSlice(unit.first, part.draws))
        if isinstance(part, Rollout)
        else replace(part, prompt=part.prompt + unit.first)  # type: ignore[type-var]
        for unit, part in zip(units, parts, strict=True)
    ]
    media = [part for part in placed if isinstance(part, Rollout)]
    if media:
        return joined_rollout(media, draws)
    return joined_texts([part for part in placed if isinstance(part, TextRollout)], draws)


def _placed(samples: Samples | StoredSamples, first: int) -> Samples | StoredSamples:
    return replace(samples, group=samples.group + first)


def all_samples(parts: Sequence[Samples | StoredSamples]) -> Samples | StoredSamples:
    """Join the samples of all units."""
    stored = [part for part in parts if isinstance(part, StoredSamples)]
    if stored:
        return StoredSamples.joined(stored)
    return joined_samples([part for part in parts if isinstance(part, Samples)])


def joined_samples(parts: Sequence[Samples]) -> Samples:
    """All samples of the parts, in order."""
    tensors = [tensor for part in parts if isinstance(tensor := part.media, Tensor)]
    if len(tensors) == len(parts) and len({t.shape[1:] for t in tensors}) == 1:
        media: Any = torch.cat(tensors)
    else:
        media = [item for part in parts for item in part.media]
    prompts = [text for part in parts for text in part.prompts]
    meta = [row for part in parts for row in part.meta]
    sounds = [part.audio for part in parts if part.audio is not None]
    audio = Audio.joined(sounds) if sounds else None
    return Samples(media, prompts, torch.cat([part.group for part in parts]), meta, audio)


def all_statistics(parts: Sequence[Statistics]) -> Statistics:
    """Join the statistics of all units' media."""
    columns = {name: torch.cat([part.columns[name] for part in parts]) for name in parts[0].columns}
    return Statistics(merged_means([(part.means, part.size) for part in parts]), columns)


def added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up numbers by name."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


@runtime_checkable
class UnitSource(Protocol):
    """Samples units outside the training process."""

    def begin(self, iteration: int) -> None:
        """Take the weights at the start of an iteration, and start the sampling that they allow:
        the draws of the iteration `workers.lag` later."""
        ...

    def draws(self, iteration: int) -> Draws | None:
        """The draws of an iteration that has been started; None for any other iteration."""
        ...

    def samples(
        self, units: list[SamplingUnit], seconds: dict[str, float]
    ) -> list[tuple[UnitSamples, UnitScores]]:
        """Wait for the samples of an iteration's units, in order, and their scores. Adds the
        workers' time per phase, and the waiting time, to `seconds`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the bytes that this process has sent and received, and the state of workers."""
        ...

    def state(self, iteration: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the numbers and weights that a checkpoint stores after this many iterations."""
        ...

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None: ...

    def close(self) -> None: ...
