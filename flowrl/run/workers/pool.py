"""Sampling workers on Ray: units are sent out, samples return in order, and lost workers change no
number.

A unit's samples are a function of its draws and of a version of the weights, so the unit of a lost
worker is sampled again by another one, with the same bits.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
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
from flowrl.iteration.features.ahead import IterationsAhead
from flowrl.iteration.open import timed_units
from flowrl.iteration.score import joined_columns
from flowrl.iteration.units import SamplingUnit, StoredSamples, UnitSamples, UnitScores
from flowrl.models.call_sizes import CallTooLarge
from flowrl.prompts import Draws
from flowrl.run.evaluate.trial import AskedTrial, Trial
from flowrl.run.workers.cluster import Cluster
from flowrl.run.workers.crew import Crew
from flowrl.run.workers.flights import Flight, PieceResult, Sent, WorkersTrial
from flowrl.run.workers.opening import cause_of, first_line
from flowrl.run.workers.sampler import (
    Asked,
    AskedPrompts,
    MadePiece,
    MadePrompts,
    later_rewards,
)
from flowrl.run.workers.scoring import WORKERS_ASKED, ReplicatedReward
from flowrl.run.workers.transport import all_states, brought_to, bytes_of
from flowrl.session.learner import evaluated
from flowrl.session.session import Session
from rewards import Samples, Scores


class SamplingPool:
    """The sampling workers of a training process: a `UnitSource`."""

    def __init__(self, session: Session, cluster: Cluster) -> None:
        self.session, self.settings = session, session.run.workers
        self.crew = Crew(session, cluster)
        self.ahead = IterationsAhead(session, timed_units(session))
        self.flights: dict[int, Flight[SamplingUnit]] = {}  # by iteration
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
            start = started[k]
            ask = partial(self._ask, version=start.version)
            self.flights.setdefault(k, Flight(ask, start.units)).send()
        self.flights = {k: flight for k, flight in self.flights.items() if k in started}
        self.placed = {v: weights for v, weights in self.placed.items() if v in self.ahead.weights}
        self.sending = time.perf_counter() - began

    def _place(self, version: int) -> Any:
        """The reference of the weights of a version that sample."""
        if version not in self.placed:
            sampling = self.ahead.weights[version][self.session.algorithm.behaviour]
            self.placed[version] = ray.put(sampling)
            self.count("weights", bytes_of(sampling))
        return self.placed[version]

    def _ask(self, unit: SamplingUnit, version: int) -> Sent:
        """Give a unit to the next worker, and its samples to the replicas of rewards."""
        placed = self._place(version)
        later = later_rewards(self.session, unit.iteration)
        request = Asked(unit, version, dict(vars(self.session.learner.policy.sizes)), later)
        worker = self.crew.next()
        sample = worker.sample.options(num_returns=2)
        reference, samples = sample.remote(request, placed)
        return Sent(worker, reference, samples, {n: self._reward(n).ask(samples) for n in later})

    def _reward(self, label: str) -> ReplicatedReward:
        reward = self.session.rewards[label]
        assert isinstance(reward, ReplicatedReward), "`later_rewards` names only these"
        return reward

    def count(self, kind: str, size: int) -> None:
        self.sizes[kind] = self.sizes.get(kind, 0.0) + size

    # The samples of an iteration

    def draws(self, iteration: int) -> Draws | None:
        return self.ahead.draws(iteration)

    def samples(
        self, units: list[SamplingUnit], seconds: dict[str, float]
    ) -> list[tuple[UnitSamples, UnitScores]]:
        """Wait for an iteration's samples, in order. An error of a worker is raised here."""
        flight = self.flights[units[0].iteration]
        if flight.pieces != units:  # a later round, of draws that scores chose
            flight = Flight(flight.ask, units)
        device = torch.device(self.session.parallel.device)
        results = [
            self._whole(flight, number, *result)
            for number, result in enumerate(self.made(flight, seconds))
        ]
        return [brought_to(unit, device) for unit in results]

    def made(self, flight: Flight[Any], seconds: dict[str, float]) -> list[PieceResult]:
        """Wait for all pieces, in order."""
        flight.send()
        try:
            return [self._made(flight, number, seconds) for number in range(len(flight.pieces))]
        except CallTooLarge:
            flight.sent = []  # asked again, with smaller calls
            raise

    def metrics(self) -> dict[str, float]:
        """Return the bytes that this iteration has sent, and the state of the workers."""
        sizes, self.sizes, busy, self.busy = self.sizes, {}, self.busy, {}
        sizes = {"weights": 0.0, "samples": 0.0, "media": 0.0, "shown": 0.0} | sizes
        return {
            **self.ahead.metrics(),
            **{f"workers/bytes/{kind}": size for kind, size in sizes.items()},
            "seconds/sending": self.sending,
            **{f"workers/seconds/{phase}": duration for phase, duration in busy.items()},
            "workers/joined": float(len(self.crew.joined)),
            "workers/restarts": float(self.crew.restarts),
        }

    def _made(self, flight: Flight[Any], number: int, seconds: dict[str, float]) -> PieceResult:
        """A piece's results with the scores of replicas. It is requested again if its worker is
        lost, or its samples before a replica has scored them."""
        reason = ""
        for _ in range(WORKERS_ASKED):
            request, began = flight.sent[number], time.perf_counter()
            try:
                piece: MadePiece = self._get(flight, number, request.result)
            except RayError as error:
                reason = first_line(error)
                self._again(flight, number, reason)
                continue
            between = time.perf_counter()
            _add(seconds, {"waiting/sampling": between - began})
            try:
                scores = {
                    n: self._reward(n).result(w, request.samples) for n, w in request.scores.items()
                }
            except ObjectLostError as error:  # the samples are gone, with the worker's node
                reason = first_line(error)
                self._again(flight, number, reason)
                continue
            except RayError as error:  # the worker is well
                reason = first_line(error)
                flight.sent[number] = flight.ask(flight.pieces[number])
                continue
            _add(seconds, {"waiting/scoring": time.perf_counter() - between})
            _add(self.busy, piece.seconds)
            _add(self.busy, {"replicas": sum(duration for *_, duration in scores.values())})
            kind = "samples" if isinstance(piece.result, tuple) else "evaluation"
            self.count(kind, piece.sizes[0])
            self.count("media", piece.sizes[1] * len(scores))
            return piece, scores
        raise UserError(
            f"workers: a unit was lost {WORKERS_ASKED} times ({reason}); see `ray status`, or "
            "raise workers.limit"
        )

    def _get(self, flight: Flight[Any], number: int, reference: Any) -> Any:
        """A worker's result. RayError if it is lost or late; a late worker is ended."""
        try:
            return ray.get(reference, timeout=self.settings.limit)
        except GetTimeoutError:
            ray.kill(flight.sent[number].worker, no_restart=False)
            raise
        except RayTaskError as error:
            raise cause_of(error) from None

    def _again(self, flight: Flight[Any], number: int, reason: str) -> None:
        self.crew.lost(flight.sent[number].worker, reason)
        flight.sent[number] = flight.ask(flight.pieces[number])

    def _whole(
        self, flight: Flight[SamplingUnit], number: int, piece: MadePiece, later: Mapping[str, Any]
    ) -> tuple[UnitSamples, UnitScores]:
        """A unit with the scores of all rewards; media stay where they are until they are
        requested."""
        assert isinstance(piece.result, tuple) and not isinstance(piece.result, MadePrompts)
        (unit_samples, scored), names = piece.result, tuple(self.session.rewards)
        columns = zip(*(part for part, *_ in later.values()), strict=True) if later else None
        scores = scored.plans
        if columns is not None:
            remote = [
                Scores.of_rewards(dict(zip(later, column, strict=True))) for column in columns
            ]
            scores = tuple(
                replace(joined_columns((local, more), names), intermediate=local.intermediate)
                for local, more in zip(scored.plans, remote, strict=True)
            )
        unit_samples = replace(
            unit_samples, rollouts=tuple(all_states(rollout) for rollout in unit_samples.rollouts)
        )
        reports = dict(scored.reports)
        for _, report, _ in later.values():
            _add(reports, report)
        prompts, rows = self.session.prompts, flight.pieces[number].rows
        bring = [partial(self.fetch, flight, number, k) for k in range(len(unit_samples.rollouts))]
        samples: tuple[Samples | StoredSamples, ...] = tuple(
            StoredSamples.of(rollout, prompts, rows, piece.kind, fetch)
            for rollout, fetch in zip(unit_samples.rollouts, bring, strict=True)
        )
        if self.session.algorithm.reward_gradient:  # compared with the samples that it rebuilds
            samples = tuple(fetch() for fetch in bring)
        scored = replace(scored, plans=scores, samples=samples, reports=reports)
        return replace(unit_samples, samples=samples), scored

    def fetch(self, flight: Flight[Any], number: int, plan: int) -> Samples:
        """The samples of a unit with their media, for a page or a tracker."""
        for _ in range(WORKERS_ASKED):
            try:
                samples = self._get(flight, number, flight.sent[number].samples)[plan]
                self.count("shown", bytes_of(samples))
                return samples
            except RayError as error:
                self._again(flight, number, first_line(error))
        raise UserError("workers: samples that a page shows were lost three times; resume the run")

    # Evaluations

    def ask(self, slices: list[Trial], iteration: int) -> AskedTrial:
        """Ask for an evaluation of the weights with which an iteration will begin."""
        self.crew.join()
        session, name = self.session, evaluated(self.session.run)
        if name == session.algorithm.behaviour:  # the iteration's samples need them too
            weights = self.ahead.keep(iteration)[name]
            placed = self._place(iteration)
        else:
            weights = session.learner.policies.copies({name})[name]
            placed = ray.put(weights)
            self.count("evaluation", bytes_of(weights))

        def ask(part: Trial) -> Sent:
            sizes = dict(vars(session.learner.evaluator.sizes))
            worker = self.crew.next()
            evaluate = worker.evaluate.options(num_returns=2)
            refs = evaluate.remote(AskedPrompts(part.rows, iteration, sizes), placed)
            return Sent(worker, refs[0], refs[1], {})

        flight = Flight(ask, slices)
        flight.send()
        return WorkersTrial(flight, weights, self.made, self.fetch)

    # The start and the end

    def close(self) -> None:
        self.crew.close()

    # Checkpoints

    def state(self, iteration: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return self.ahead.state(iteration)

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.ahead.restore(state, weights)


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value
