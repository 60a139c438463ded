"""Iterations whose draws are chosen, and whose weights are kept, `workers.lag` iterations before
they are learned from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from flowrl.iteration.draw_requests import draw_request
from flowrl.iteration.features.units import units_of
from flowrl.iteration.records import Drawn
from flowrl.iteration.sample import UnitStages, sampling_weights
from flowrl.iteration.units import LAG, SamplingUnit, UnitSamples, UnitScores
from flowrl.models.language.policy import CausalPolicy
from flowrl.prompts import Draws
from flowrl.session.policies import PolicyWeights
from flowrl.session.session import SPENDING, Session
from samplers.completions import TextPlan
from samplers.generate import Writer


@dataclass(frozen=True)
class Started:
    """An iteration whose draws are chosen.

    version  of the weights that sample: the iteration that began with them
    units    of this process's draws
    more     metrics of the choice of draws
    """

    draws: Draws
    version: int
    units: list[SamplingUnit]
    more: Mapping[str, float] = field(default_factory=dict)


class IterationsAhead:
    """The iterations from the one that is learned from to the one `lag` later, by number, and the
    weights that sample them, by version.

    As a `UnitSource` it samples in the training process, when samples are asked for: a lag without
    workers, to the same bits."""

    def __init__(
        self, session: Session, unit_stages: Callable[[dict[str, float]], UnitStages]
    ) -> None:
        """`unit_stages`: how a unit is sampled and scored, with its seconds added to a mapping."""
        self.session, self.unit_stages = session, unit_stages
        self.started: dict[int, Started] = {}
        self.weights: dict[int, PolicyWeights] = {}
        self.age = 0  # of this iteration's samples, in iterations
        self.more: Mapping[str, float] = {}  # metrics of the choice of its draws

    def begin(self, iteration: int) -> None:
        """Keep the weights with which an iteration begins, and start the one that is `lag` later,
        even after the last one: a run may be resumed with more. At first all up to that one. Then
        hand the policies the weights that sampled."""
        session = self.session
        self.started = {k: start for k, start in self.started.items() if k >= iteration}
        policies = session.learner.policies
        self.keep(iteration)
        reached = range(iteration, iteration + session.run.workers.lag + 1)
        new = [k for k in reached if k not in self.started]
        for k in new:
            self._start(k, iteration)
        versions = {iteration, *(start.version for start in self.started.values())}
        self.weights = {v: weights for v, weights in self.weights.items() if v in versions}
        current = self.started[iteration]
        self.age, self.more = iteration - current.version, current.more
        policies.keep_sampled({} if self.age == 0 else self.weights[current.version])
        self._ask_server([unit for k in new for unit in self.started[k].units])

    def _ask_server(self, units: Sequence[SamplingUnit]) -> None:
        """Have a server sample these while the model is updated: it has the present weights only
        until an evaluation or the next iteration loads others."""
        session, policy = self.session, self.session.learner.policy
        if not isinstance(policy, CausalPolicy) or policy.server is None:
            return
        server, algorithm, seed = policy.server, session.algorithm, session.run.train.seed
        server.ahead.wait()
        with session.learner.policies.using(algorithm.behaviour):
            for unit in units:
                batch = policy.open(*session.prompts.take(unit.rows), algorithm.steps)
                plans = algorithm.planned([0.0] * (batch.steps + 1), unit.iteration, seed)
                if batch.answers is None:  # an environment's turns are asked for as they come
                    writer = Writer(server, batch.contexts, unit.ids, seed, unit.iteration)
                    server.begin(writer, [plan for plan in plans if isinstance(plan, TextPlan)])

    def keep(self, iteration: int) -> PolicyWeights:
        """Copies of the weights with which an iteration begins, made once."""
        algorithm = self.session.algorithm
        averages = {average.name for average in algorithm.averages} & {*algorithm.roles}
        if iteration not in self.weights:
            names = {algorithm.behaviour, *averages}
            self.weights[iteration] = self.session.learner.policies.copies(names)
        return self.weights[iteration]

    def _start(self, iteration: int, version: int) -> None:
        session = self.session
        request = draw_request(session, iteration)
        more: dict[str, float] = {}
        if SPENDING in session.table:
            draws, more = session.table[SPENDING].first_draws(request)
        else:
            draws = request.drawn()
        draws = session.winnable(iteration, draws)
        self.started[iteration] = Started(draws, version, self._units(iteration, draws), more)

    def _units(self, iteration: int, draws: Draws) -> list[SamplingUnit]:
        """The units of this process's share of draws."""
        session = self.session
        drawn = Drawn.of(session.parallel, iteration, draws, session.algorithm.behaviour)
        return units_of(session, drawn.unit)

    def draws(self, iteration: int) -> Draws | None:
        started = self.started.get(iteration)
        return None if started is None else started.draws

    def samples(
        self, units: Sequence[SamplingUnit], seconds: dict[str, float]
    ) -> list[tuple[UnitSamples, UnitScores]]:
        pairs = list[tuple[UnitSamples, UnitScores]]()
        stages, learner = self.unit_stages(seconds), self.session.learner
        for unit in units:
            late = replace(unit, by=sampling_weights(learner, unit.by))
            sampled, scores = stages.run(late)
            pairs.append((sampled.unit, scores))
        return pairs

    def metrics(self) -> dict[str, float]:
        return {**self.more, LAG: float(self.age)}

    def state(self, iteration: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        ahead = {k: start for k, start in self.started.items() if k >= iteration}
        numbers = {
            str(k): {"draws": list(start.draws), "version": start.version, "more": dict(start.more)}
            for k, start in ahead.items()
        }
        tensors = {
            f"{version}/{policy}/{name}": weight
            for version in {start.version for start in ahead.values()}
            for policy, weights in self.weights[version].items()
            for name, weight in weights.items()
        }
        return numbers, tensors

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        for key, weight in weights.items():
            version, policy, name = key.split("/", 2)
            copies = self.weights.setdefault(int(version), {})
            copies.setdefault(policy, {})[name] = weight
        for key, saved in state.items():
            draws = Draws(*(tuple(part) for part in saved["draws"]))
            units = self._units(int(key), draws)
            self.started[int(key)] = Started(draws, int(saved["version"]), units, saved["more"])

    def close(self) -> None:
        """Nothing to end: samples are drawn in this process, when they are asked for."""
