"""Sampling workers on Ray: units are sent out, samples return in order, and lost workers change no
number.

A unit's samples are a function of its draws and of a version of the weights, so the unit of a lost
worker is sampled again by another one, with the same bits.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray  # type: ignore[reportMissingImports]
import torch
from ray.exceptions import (  # type: ignore[reportMissingImports]
    GetTimeoutError,
    ObjectLostError,
    RayError,
    RayTaskError,
)
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.call_sizes import CallTooLarge
from flowrl.prompts import Draws
from flowrl.run.experience.ahead import IterationsAhead
from flowrl.run.experience.score_ahead import joined_columns
from flowrl.run.state.session import Session
from flowrl.run.state.units import SamplingUnit, StoredSamples, UnitSamples
from flowrl.run.workers.cluster import Cluster
from flowrl.run.workers.crew import Crew
from flowrl.run.workers.sampler import Asked, MadeUnit, later_rewards
from flowrl.run.workers.scoring import (
    WORKERS_ASKED,
    ReplicatedReward,
    Waiting,
    cause_of,
    first_line,
)
from flowrl.run.workers.transport import all_states, brought_to, bytes_of
from rewards import Samples, Scores


@dataclass(frozen=True)
class Sent:
    """A unit requested from a worker: references to its results and to its scores."""

    worker: Any
    made: Any
    samples: Any
    scores: Mapping[str, Waiting]


@dataclass
class Flight:
    """The units of an iteration that workers were asked for. `version`: as in `Started`."""

    version: int
    units: list[SamplingUnit]
    sent: list[Sent]


class SamplingPool:
    """The sampling workers of a training process: a `UnitSource`."""

    def __init__(self, session: Session, cluster: Cluster) -> None:
        self.session, self.settings = session, session.run.workers
        self.crew = Crew(session, cluster)
        self.ahead = IterationsAhead(session)
        self.flights: dict[int, Flight] = {}  # by iteration
        self.placed: dict[int, Any] = {}  # version -> its reference in the object store
        self.sizes: dict[str, float] = {}  # bytes that this iteration has sent, by kind
        self.busy: dict[str, float] = {}  # seconds of this iteration's samples, by phase
        self.sending = 0.0  # seconds

    # What is sampled of the weights of an iteration

    def begin(self, iteration: int) -> None:
        """Ask for the samples that the weights of an iteration allow: `IterationsAhead.begin`."""
        began = time.perf_counter()
        self.crew.join()
        self.ahead.begin(iteration)
        started, end = self.ahead.started, self.session.run.train.iterations
        for k in range(iteration, min(max(started) + 1, end)):
            each = started[k]
            self._send(self.flights.setdefault(k, Flight(each.version, each.units, [])))
        self.flights = {k: each for k, each in self.flights.items() if k in started}
        self.placed = {v: each for v, each in self.placed.items() if v in self.ahead.weights}
        self.sending = time.perf_counter() - began

    def _send(self, each: Flight) -> None:
        if not each.sent:
            each.sent = [self._ask(unit, each.version) for unit in each.units]

    def _ask(self, unit: SamplingUnit, version: int) -> Sent:
        """Give a unit to the next worker, and its samples to the replicas of rewards."""
        if version not in self.placed:
            sampling = self.ahead.weights[version][self.session.algorithm.behaviour]
            self.placed[version] = ray.put(sampling)
            self._count("weights", bytes_of(sampling))
        later = later_rewards(self.session, unit.iteration)
        asked = Asked(unit, version, dict(vars(self.session.learner.policy.sizes)), later)
        worker = self.crew.next()
        sample = worker.sample.options(num_returns=2)
        made, samples = sample.remote(asked, self.placed[version])
        return Sent(worker, made, samples, {n: self._reward(n).ask(samples) for n in later})

    def _reward(self, label: str) -> ReplicatedReward:
        reward = self.session.rewards[label]
        assert isinstance(reward, ReplicatedReward), "`later_rewards` names only these"
        return reward

    def _count(self, kind: str, size: int) -> None:
        self.sizes[kind] = self.sizes.get(kind, 0.0) + size

    # The samples of an iteration

    def draws(self, iteration: int) -> Draws | None:
        return self.ahead.draws(iteration)

    def samples(self, units: list[SamplingUnit], seconds: dict[str, float]) -> list[UnitSamples]:
        """Wait for an iteration's samples, in order. An error of a worker is raised here."""
        known = self.flights[units[0].iteration]
        if known.units != units:  # a later round, of draws that scores chose
            known = Flight(known.version, units, [])
        self._send(known)
        device = torch.device(self.session.parallel.device)
        try:
            results = [self._result(known, place, seconds) for place in range(len(units))]
        except CallTooLarge:
            known.sent = []  # asked again, with smaller calls
            raise
        return [brought_to(made, device) for made in results]

    def metrics(self) -> dict[str, float]:
        """Return the bytes that this iteration has sent, and the state of the workers."""
        sizes, self.sizes, busy, self.busy = self.sizes, {}, self.busy, {}
        sizes = {"weights": 0.0, "samples": 0.0, "media": 0.0, "shown": 0.0} | sizes
        return {
            **self.ahead.metrics(),
            **{f"workers/bytes/{kind}": size for kind, size in sizes.items()},
            "seconds/sending": self.sending,
            **{f"workers/seconds/{phase}": taken for phase, taken in busy.items()},
            "workers/joined": float(len(self.crew.joined)),
            "workers/restarts": float(self.crew.restarts),
        }

    def _result(self, known: Flight, place: int, seconds: dict[str, float]) -> UnitSamples:
        """A unit's samples, scored. A unit is requested again if its worker is lost, or its samples
        before a replica has scored them."""
        why = ""
        for _ in range(WORKERS_ASKED):
            sent, began = known.sent[place], time.perf_counter()
            try:
                made: MadeUnit = self._get(known, place, sent.made)
            except RayError as error:
                why = first_line(error)
                self._again(known, place, why)
                continue
            between = time.perf_counter()
            _add(seconds, {"waiting/sampling": between - began})
            try:
                scores = {
                    n: self._reward(n).result(w, sent.samples) for n, w in sent.scores.items()
                }
            except ObjectLostError as error:  # the samples are gone, with the worker's node
                why = first_line(error)
                self._again(known, place, why)
                continue
            except RayError as error:  # the worker is well
                why = first_line(error)
                known.sent[place] = self._ask(known.units[place], known.version)
                continue
            _add(seconds, {"waiting/scoring": time.perf_counter() - between})
            _add(self.busy, made.seconds)
            _add(self.busy, {"replicas": sum(taken for *_, taken in scores.values())})
            self._count("samples", made.sizes[0])
            self._count("media", made.sizes[1] * len(scores))
            return self._whole(known, place, made, scores)
        raise UserError(
            f"workers: a unit was lost {WORKERS_ASKED} times ({why}); see `ray status`, or raise "
            "workers.limit"
        )

    def _get(self, known: Flight, place: int, reference: Any) -> Any:
        """A worker's result. RayError if it is lost or late; a late worker is ended."""
        try:
            return ray.get(reference, timeout=self.settings.limit)
        except GetTimeoutError:
            ray.kill(known.sent[place].worker, no_restart=False)
            raise
        except RayTaskError as error:
            raise cause_of(error) from None

    def _again(self, known: Flight, place: int, why: str) -> None:
        self.crew.lost(known.sent[place].worker, why)
        known.sent[place] = self._ask(known.units[place], known.version)

    def _whole(
        self, known: Flight, place: int, made: MadeUnit, later: Mapping[str, Any]
    ) -> UnitSamples:
        """A unit with the scores of all rewards; media stay where they are until they are
        requested."""
        found, names = made.found, tuple(self.session.rewards)
        columns = zip(*(part for part, *_ in later.values()), strict=True) if later else None
        scores = found.scores
        if columns is not None:
            remote = [_scores(tuple(later), each) for each in columns]
            scores = tuple(
                replace(joined_columns((here, more), names), intermediate=here.intermediate)
                for here, more in zip(found.scores, remote, strict=True)
            )
        found = replace(found, rollouts=tuple(map(all_states, found.rollouts)))
        reports = dict(found.reports)
        for _, report, _ in later.values():
            _add(reports, report)
        prompts, rows = self.session.prompts, known.units[place].rows
        bring = [partial(self._fetch, known, place, k) for k in range(len(found.rollouts))]
        samples: tuple[Samples | StoredSamples, ...] = tuple(
            StoredSamples.of(each, prompts, rows, made.kind, own)
            for each, own in zip(found.rollouts, bring, strict=True)
        )
        if self.session.algorithm.reward_gradient:  # compared with the samples that it rebuilds
            samples = tuple(own() for own in bring)
        return replace(found, samples=samples, scores=scores, reports=reports)

    def _fetch(self, known: Flight, place: int, plan: int) -> Samples:
        """The samples of a unit with their media, for a page or a tracker."""
        for _ in range(WORKERS_ASKED):
            try:
                samples = self._get(known, place, known.sent[place].samples)[plan]
                self._count("shown", bytes_of(samples))
                return samples
            except RayError as error:
                self._again(known, place, first_line(error))
        raise UserError("workers: samples that a page shows were lost three times; resume the run")

    # The start and the end

    def close(self) -> None:
        self.crew.close()

    # Checkpoints

    def state(self, iteration: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return self.ahead.state(iteration)

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.ahead.restore(state, weights)


def _scores(names: tuple[str, ...], columns: Sequence[Tensor]) -> Scores:
    values = torch.stack([*columns], 1)
    known = ~values.isnan()
    return Scores(values.nan_to_num(0.0), known, names)


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value
