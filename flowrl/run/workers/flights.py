"""Units that workers were asked for: of an iteration, or of an evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from flowrl.iteration.units import StoredSamples
from flowrl.run.evaluate.trial import ScoredTrial, StoredTrial, Trial
from flowrl.run.workers.sampler import MadePrompts, MadeUnit
from flowrl.run.workers.scoring import Waiting
from flowrl.session.policies import NamedWeights
from rewards import Samples

T = TypeVar("T")
UnitResult = tuple[MadeUnit, Mapping[str, Any]]  # a unit's results, and those of replicas


@dataclass(frozen=True)
class Sent:
    """A unit requested from a worker: references to its results and to its scores."""

    worker: Any
    result: Any
    samples: Any
    scores: Mapping[str, Waiting]


@dataclass
class Flight(Generic[T]):
    """Units that workers were asked for, and how to ask for one."""

    ask: Callable[[T], Sent]
    units: list[T]
    sent: list[Sent] = field(default_factory=list)

    def send(self) -> None:
        """Ask for all units, unless they were asked for."""
        if not self.sent:
            self.sent = [*map(self.ask, self.units)]


@dataclass
class WorkersTrial:
    """An evaluation that workers were asked for: an `AskedTrial`.

    wait   for the results of all units
    fetch  the samples of a unit and plan
    """

    flight: Flight[Trial]
    weights: NamedWeights
    wait: Callable[[Flight[Any], dict[str, float]], list[UnitResult]]
    fetch: Callable[[Flight[Any], int, int], Samples]
    waited: float = 0.0

    def parts(self) -> list[ScoredTrial]:
        seconds: dict[str, float] = {}
        results = self.wait(self.flight, seconds)
        self.waited += sum(seconds.values())
        return [self._part(place, unit) for place, (unit, _) in enumerate(results)]

    def _part(self, place: int, unit_result: MadeUnit) -> ScoredTrial:
        """A unit's scores, with samples whose media stay where they are until a page shows them."""
        unit, result = self.flight.units[place], unit_result.result
        assert isinstance(result, MadePrompts)
        group = torch.arange(len(unit.rows)).repeat_interleave(unit.group)
        texts, meta = unit.prompts.take([unit.rows[i] for i in group.tolist()])
        bring = partial(self.fetch, self.flight, place, 0)
        samples = StoredSamples(((len(group), bring),), texts, group, meta, unit_result.kind)
        return ScoredTrial(StoredTrial(samples, result.statistics), result.scores, result.more)
