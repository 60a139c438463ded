"""Pieces of work that workers were asked for: units of draws, or slices of an evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from flowrl.iteration.units import StoredSamples
from flowrl.run.evaluate.trial import ScoredTrial, StoredTrial, Trial
from flowrl.run.workers.sampler import MadePiece, MadePrompts
from flowrl.run.workers.scoring import Waiting
from flowrl.session.policies import NamedWeights
from rewards import Samples

T = TypeVar("T")
PieceResult = tuple[MadePiece, Mapping[str, Any]]  # a piece's results, and those of replicas


@dataclass(frozen=True)
class Sent:
    """A piece requested from a worker: references to its results and to its scores."""

    worker: Any
    result: Any
    samples: Any
    scores: Mapping[str, Waiting]


@dataclass
class Flight(Generic[T]):
    """Pieces that workers were asked for, and how to ask for one."""

    ask: Callable[[T], Sent]
    pieces: list[T]
    sent: list[Sent] = field(default_factory=list)

    def send(self) -> None:
        """Ask for all pieces, unless they were asked for."""
        if not self.sent:
            self.sent = [*map(self.ask, self.pieces)]


@dataclass
class WorkersTrial:
    """An evaluation that workers were asked for: an `AskedTrial`.

    wait   for the results of all slices
    fetch  the samples of a slice
    """

    flight: Flight[Trial]
    weights: NamedWeights
    wait: Callable[[Flight[Any], dict[str, float]], list[PieceResult]]
    fetch: Callable[[Flight[Any], int, int], Samples]
    waited: float = 0.0

    def parts(self) -> list[ScoredTrial]:
        seconds: dict[str, float] = {}
        results = self.wait(self.flight, seconds)
        self.waited += sum(seconds.values())
        return [self._part(number, made_piece) for number, (made_piece, _) in enumerate(results)]

    def _part(self, number: int, made_piece: MadePiece) -> ScoredTrial:
        """A slice's scores, with samples whose media stay where they are until shown."""
        part, result = self.flight.pieces[number], made_piece.result
        assert isinstance(result, MadePrompts)
        group = torch.arange(len(part.rows)).repeat_interleave(part.group)
        texts, meta = part.prompts.take([part.rows[i] for i in group.tolist()])
        bring = partial(self.fetch, self.flight, number, 0)
        samples = StoredSamples(((len(group), bring),), texts, group, meta, made_piece.kind)
        return ScoredTrial(StoredTrial(samples, result.statistics), result.scores, result.more)
