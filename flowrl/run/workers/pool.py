"""Sampling workers on Ray: units are sent out, samples return in order, and lost workers change no
number.

A unit's samples are a function of its draws and of a version of the weights, so the unit of a lost
worker is sampled again by another one, with the same bits.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray  # type: ignore[reportMissingImports]
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError  # type: ignore[reportMissingImports]
from torch import Tensor

from flowrl.budget.spending import DrawRequest
from flowrl.errors import UserError
from flowrl.models.call_sizes import CallTooLarge
from flowrl.prompts import Draws
from flowrl.run.experience.score_ahead import joined_columns
from flowrl.run.experience.units import units_of
from flowrl.run.state.policies import PolicyWeights
from flowrl.run.state.session import Session
from flowrl.run.state.units import LAG, SamplingUnit, StoredSamples, UnitSamples
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
class Started:
    """An iteration that workers are sampling.

    version  of the sampling weights: the iteration that started with them
    more     metrics of the choice of draws
    """

    draws: Draws
    version: int
    units: list[SamplingUnit]
    more: Mapping[str, float] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)


class SamplingPool:
    """The sampling workers of a training process: a `UnitSource`."""

    def __init__(self, session: Session, cluster: Cluster) -> None:
        self.session, self.settings = session, session.run.workers
        self.crew = Crew(session, cluster)
        self.started: dict[int, Started] = {}
        self.weights: dict[int, PolicyWeights] = {}
        self.placed: dict[int, Any] = {}  # version -> its reference in the object store
        self.sizes: dict[str, float] = {}  # bytes that this iteration has sent, by kind
        self.busy: dict[str, float] = {}  # seconds of this iteration's samples, by phase
        self.sending = 0.0  # seconds
        self.age = 0  # of this iteration's samples, in iterations
        self.more: Mapping[str, float] = {}  # metrics of the choice of its draws

    # The weights of an iteration, and what is sampled of them

    def begin(self, iteration: int) -> None:
        """Keep the weights at the start of an iteration, and start the iteration `lag` later; at
        first, all iterations up to it. Then give the policies the sampling weights."""
        began, session = time.perf_counter(), self.session
        last = session.run.train.iterations - 1
        self.crew.join()
        self.started = {k: each for k, each in self.started.items() if k >= iteration}
        policies, algorithm = session.learner.policies, session.algorithm
        averages = {each.name for each in algorithm.averages} & {*algorithm.roles}
        self.weights[iteration] = policies.copies({algorithm.behaviour, *averages})
        for k in range(iteration, min(iteration + self.settings.lag, last) + 1):
            if k not in self.started:
                self._start(k, iteration)
        for each in self.started.values():
            self._send(each)
        used = {iteration, *(each.version for each in self.started.values())}
        self.weights = {v: each for v, each in self.weights.items() if v in used}
        self.placed = {v: each for v, each in self.placed.items() if v in used}
        now = self.started[iteration]
        self.age, self.more = iteration - now.version, now.more
        policies.keep_sampled({} if self.age == 0 else self.weights[now.version])
        self.sending = time.perf_counter() - began

    def _start(self, iteration: int, version: int) -> None:
        session = self.session
        count, seed = session.run.drawn, session.run.train.seed
        weights = session.tracker.weights(len(session.prompts)) if session.tracker else None
        more: dict[str, float] = {}
        if session.spending is None:
            draws = session.prompts.draw(iteration, count, seed, weights)
        else:
            request = DrawRequest(session.prompts, count, seed, iteration, weights)
            draws, more = session.spending.first_draws(request)
        self.started[iteration] = Started(draws, version, self._units(iteration, draws), more)

    def _units(self, iteration: int, draws: Draws) -> list[SamplingUnit]:
        """The units of this process's share of draws."""
        mine, _ = self.session.parallel.share(len(draws.ids))
        ids, rows = (part[mine.start : mine.stop] for part in (draws.ids, draws.rows))
        return units_of(self.session, SamplingUnit(iteration, ids, rows))

    def _send(self, each: Started) -> None:
        if not each.sent:
            each.sent = [self._ask(unit, each.version) for unit in each.units]

    def _ask(self, unit: SamplingUnit, version: int) -> Sent:
        """Give a unit to the next worker, and its samples to the replicas of rewards."""
        if version not in self.placed:
            sampling = self.weights[version][self.session.algorithm.behaviour]
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
        found = self.started.get(iteration)
        return None if found is None else found.draws

    def samples(self, units: list[SamplingUnit], seconds: dict[str, float]) -> list[UnitSamples]:
        """Wait for an iteration's samples, in order. Errors of workers are raised here."""
        known = self.started[units[0].iteration]
        if known.units != units:  # a later round, of draws that scores chose
            known = Started(known.draws, known.version, units)
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
            **self.more,
            **{f"workers/bytes/{kind}": size for kind, size in sizes.items()},
            LAG: float(self.age),
            "seconds/sending": self.sending,
            **{f"workers/seconds/{phase}": taken for phase, taken in busy.items()},
            "workers/joined": float(len(self.crew.joined)),
            "workers/restarts": float(self.crew.restarts),
        }

    def _result(self, known: Started, place: int, seconds: dict[str, float]) -> UnitSamples:
        """A unit's samples, scored. A unit whose worker is lost is requested again."""
        why = ""
        for _ in range(WORKERS_ASKED):
            sent, began = known.sent[place], time.perf_counter()
            try:
                made: MadeUnit = self._get(known, place, sent.made)
                between = time.perf_counter()
                scores = {
                    n: self._reward(n).result(w, sent.samples) for n, w in sent.scores.items()
                }
                _add(seconds, {"waiting/sampling": between - began})
                _add(seconds, {"waiting/scoring": time.perf_counter() - between})
            except RayError as error:
                why = first_line(error)
                self._again(known, place, why)
                continue
            _add(self.busy, made.seconds)
            _add(self.busy, {"replicas": sum(taken for *_, taken in scores.values())})
            self._count("samples", made.sizes[0])
            self._count("media", made.sizes[1] * len(scores))
            return self._whole(known, place, made, scores)
        raise UserError(
            f"workers: {WORKERS_ASKED} workers have not sampled a unit ({why}); see `ray status`, "
            "or raise workers.limit"
        )

    def _get(self, known: Started, place: int, reference: Any) -> Any:
        """A worker's result. RayError if it is lost or late; a late worker is ended."""
        try:
            return ray.get(reference, timeout=self.settings.limit)
        except GetTimeoutError:
            ray.kill(known.sent[place].worker, no_restart=False)
            raise
        except RayTaskError as error:
            raise cause_of(error) from None

    def _again(self, known: Started, place: int, why: str) -> None:
        self.crew.lost(known.sent[place].worker, why)
        known.sent[place] = self._ask(known.units[place], known.version)

    def _whole(
        self, known: Started, place: int, made: MadeUnit, later: Mapping[str, Any]
    ) -> UnitSamples:
        """A unit with the scores of all rewards; media stay where they are until they are
        requested."""
        found, names = made.found, tuple(self.session.rewards)
        columns = zip(*(part for part, *_ in later.values()), strict=True) if later else None
        scores = found.scores
        if columns is not None:
            remote = [_scores(tuple(later), each) for each in columns]
            scores = tuple(
                replace(joined_columns((here, more), names), way=here.way)
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

    def _fetch(self, known: Started, place: int, plan: int) -> Samples:
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
        ahead = {k: each for k, each in self.started.items() if k >= iteration}
        numbers = {
            str(k): {"draws": list(each.draws), "version": each.version, "more": dict(each.more)}
            for k, each in ahead.items()
        }
        tensors = {
            f"{version}/{policy}/{name}": weight
            for version in {each.version for each in ahead.values()}
            for policy, weights in self.weights[version].items()
            for name, weight in weights.items()
        }
        return numbers, tensors

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        for key, weight in weights.items():
            version, policy, name = key.split("/", 2)
            known = self.weights.setdefault(int(version), {})
            known.setdefault(policy, {})[name] = weight
        for key, each in state.items():
            draws = Draws(*(tuple(part) for part in each["draws"]))
            units = self._units(int(key), draws)
            self.started[int(key)] = Started(draws, int(each["version"]), units, each["more"])


def _scores(names: tuple[str, ...], columns: Sequence[Tensor]) -> Scores:
    values = torch.stack([*columns], 1)
    known = ~values.isnan()
    return Scores(values.nan_to_num(0.0), known, names)


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value
