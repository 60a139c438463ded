"""Units: whole draws that are encoded, sampled, decoded and scored in their own calls.

A sample's noise belongs to its draw, so results do not depend on where a unit is sampled, and
depend on the cut into units only by rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.media.statistics import Statistics
from flowrl.models.policy import RolloutLike
from flowrl.prompts import Draws, PromptSet
from rewards import Samples, Scores
from rewards.audio import Audio
from samplers.host import on_host

LAG = "workers/lag"  # the metric: iterations between the weights that sampled and those trained


@dataclass(frozen=True)
class SamplingUnit:
    """Draws of an iteration: their ids and their rows of the prompt file. `first` is the index of
    its first draw among the process's draws, `texts` are as in `Draws`, and `by` is the policy that
    samples them (None: the algorithm's own)."""

    iteration: int
    ids: tuple[int, ...]
    rows: tuple[int, ...]
    first: int = 0
    texts: tuple[str, ...] = ()
    by: str | None = None

    def cut(self, size: int) -> "list[SamplingUnit]":
        """Cut into units of `size` draws; the last unit may have fewer."""
        starts = range(0, len(self.ids), size)
        parts = [(at, slice(at, at + size)) for at in starts]
        return [replace(self, ids=self.ids[s], rows=self.rows[s], first=at) for at, s in parts]


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
            tuple(part for each in parts for part in each.parts),
            [text for each in parts for text in each.prompts],
            torch.cat([each.group for each in parts]),
            [row for each in parts for row in each.meta],
            parts[0].kind,
        )

    def on_cpu(self) -> "StoredSamples":
        return self

    def take(self, rows: Sequence[int]) -> Samples:
        """Samples of these rows, in this order."""
        media, sounds, first = dict[int, Any](), dict[int, Audio](), 0
        for count, bring in self.parts:
            here = {row - first for row in rows if first <= row < first + count}
            brought = bring() if here else None
            if brought is not None:
                media |= {first + i: brought.media[i] for i in here}
            if brought is not None and brought.audio is not None:
                sounds |= {first + i: brought.audio.take([i]) for i in here}
            first += count
        taken = [media[row] for row in rows]
        tensors = [each for each in taken if isinstance(each, Tensor)]
        same = len(tensors) == len(rows) and len({each.shape for each in tensors}) == 1
        whole = torch.stack(tensors) if same and tensors else taken
        group = self.group[torch.tensor([*rows], dtype=torch.long)]
        meta = [self.meta[row] for row in rows] if self.meta else ()
        audio = Audio.joined([sounds[row] for row in rows]) if sounds else None
        return Samples(whole, [self.prompts[row] for row in rows], group, meta, audio)


@dataclass(frozen=True)
class UnitSamples:
    """Samples of a unit, by plan.

    looked       number of intermediate samples that were scored: to steer, to guide, or for credit
    evaluations  evaluations of the network, as counted by `Meter`
    reports      numbers that rewards report on their calls, if another process made the calls
    """

    rollouts: tuple[RolloutLike, ...]
    samples: tuple[Samples | StoredSamples, ...]
    scores: tuple[Scores, ...]
    statistics: Statistics  # of the first plan's samples
    looked: int
    evaluations: int
    reports: Mapping[str, float] = field(default_factory=dict)


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

    def samples(self, units: list[SamplingUnit], seconds: dict[str, float]) -> list[UnitSamples]:
        """Wait for the samples of an iteration's units, in order. Adds the workers' time per phase,
        and the waiting time, to `seconds`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the bytes that this process has sent and received, and the state of workers."""
        ...

    def state(self, iteration: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the numbers and weights that a checkpoint stores after this many iterations."""
        ...

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None: ...

    def close(self) -> None: ...
