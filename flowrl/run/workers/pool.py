"""Sampling workers on Ray: units go out, samples come back in order, and deaths change no number.

A unit's samples are a function of its draws and of a version of the weights. Ray starts a worker
again that has died, and asks it again; a worker that does not answer is ended and replaced.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray  # type: ignore[reportMissingImports]
import torch
from ray.exceptions import (  # type: ignore[reportMissingImports]
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.call_sizes import CallTooLarge
from flowrl.prompts import Draws
from flowrl.run.experience.units import units_of
from flowrl.run.state.session import Session
from flowrl.run.state.units import SamplingUnit, UnitSamples
from flowrl.run.workers.sampler import Asked, SamplingWorker, facts, trial
from flowrl.run.workers.transport import all_tensors, brought_to
from flowrl.settings.read import dump

WeightsByName = Mapping[str, Tensor]
SAME = 1e-3  # largest difference of a worker's first draw, of the size of its numbers
REPLACED = 3  # times that a unit is given to another worker before the run ends


@dataclass
class Started:
    """An iteration that workers are sampling. `results` holds a reference and its worker for each
    unit."""

    draws: Draws
    version: int
    units: list[SamplingUnit]
    results: list[tuple[Any, Any]] = field(default_factory=list)


class SamplingPool:
    """The sampling workers of a training process: a `UnitSource`."""

    def __init__(self, session: Session) -> None:
        run, device = session.run, session.parallel.device
        self.session, self.settings = session, run.workers
        self.ours = not ray.is_initialized()
        if self.ours:
            ray.init(
                address=self.settings.address,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
        gpus = self.settings.gpus
        actor = ray.remote(SamplingWorker).options(  # type: ignore[reportUnknownMemberType]
            num_cpus=0,
            num_gpus=float(device == "cuda") if gpus is None else gpus,
            scheduling_strategy="SPREAD",
            max_restarts=-1,
            max_task_retries=-1,
        )
        tree, threads = dump(run), torch.get_num_threads()
        self.actors: list[Any] = [
            actor.remote(tree, threads) for _ in range(self.settings.sampling)
        ]
        self.joined: list[Any] = []  # those that have passed the comparison, in turn
        self.joining: dict[Any, Any] = {}  # reference of a first draw -> its worker
        self.own: list[Tensor] = []  # this process's first draw
        self.worst, self.turn = 0.0, 0
        self.started: dict[int, Started] = {}
        self.weights: dict[int, WeightsByName] = {}
        self.placed: dict[int, Any] = {}  # version -> its reference in the object store

    # The weights of an iteration, and what is sampled of them

    def begin(self, iteration: int) -> None:
        """Keep the weights with which an iteration begins, and start the iteration `lag` later; at
        the beginning, start all iterations up to that one."""
        session, last = self.session, self.session.run.train.iterations - 1
        self._join(0)
        self.started = {k: each for k, each in self.started.items() if k >= iteration}
        self._keep(iteration)
        for k in range(iteration, min(iteration + self.settings.lag, last) + 1):
            if k not in self.started and session.spending is None:
                self._start(k, iteration)
        for each in self.started.values():
            self._send(each)
        used = {iteration, *(each.version for each in self.started.values())}
        self.weights = {v: each for v, each in self.weights.items() if v in used}
        self.placed = {v: each for v, each in self.placed.items() if v in used}

    def _keep(self, version: int) -> None:
        learner = self.session.learner
        with learner.policies.using(learner.algorithm.behaviour):
            cpu = torch.device("cpu")
            self.weights[version] = {
                name: p.detach().to(cpu, copy=True) for name, p in learner.policies.network.items()
            }

    def _start(self, iteration: int, version: int) -> None:
        session = self.session
        count, seed = session.run.drawn, session.run.train.seed
        weights = session.tracker.weights(len(session.prompts)) if session.tracker else None
        draws = session.prompts.draw(iteration, count, seed, weights)
        mine, _ = session.parallel.share(len(draws.ids))
        ids, rows = (part[mine.start : mine.stop] for part in (draws.ids, draws.rows))
        units = units_of(session, SamplingUnit(iteration, ids, rows))
        self.started[iteration] = Started(draws, version, units)

    def _send(self, each: Started) -> None:
        if not each.results:
            each.results = [self._ask(unit, each.version) for unit in each.units]

    def _ask(self, unit: SamplingUnit, version: int) -> tuple[Any, Any]:
        """Give a unit to the workers in turn. Returns a reference of its result, and the worker."""
        if version not in self.placed:
            self.placed[version] = ray.put(self.weights[version])
        sizes = dict(vars(self.session.learner.policy.sizes))
        actor = self.joined[self.turn % len(self.joined)]
        self.turn += 1
        return actor.sample.remote(Asked(unit, version, sizes), self.placed[version]), actor

    # The samples of an iteration

    def draws(self, iteration: int) -> Draws | None:
        found = self.started.get(iteration)
        return None if found is None else found.draws

    def samples(self, units: list[SamplingUnit], seconds: dict[str, float]) -> list[UnitSamples]:
        """Wait for an iteration's samples, in order. An error of a worker is raised here."""
        known = self.started.get(units[0].iteration)
        if known is None or known.units != units:  # a later round, of draws that scores chose
            newest = max(self.weights)
            known = Started(Draws.each((), ()), newest, units)
        self._send(known)
        began = time.perf_counter()
        made: list[UnitSamples] = []
        try:
            for place in range(len(units)):
                samples, taken = self._result(known, place)
                made.append(brought_to(samples, torch.device(self.session.parallel.device)))
                for phase, each in taken.items():
                    seconds[phase] = seconds.get(phase, 0.0) + each
        except CallTooLarge:
            known.results = []  # asked again, with smaller calls
            raise
        seconds["waiting"] = seconds.get("waiting", 0.0) + time.perf_counter() - began
        return made

    def _result(self, known: Started, place: int) -> tuple[UnitSamples, dict[str, float]]:
        """A unit's result. A worker that does not answer in time is ended, and Ray starts it
        again; the unit goes to the next one."""
        for _ in range(REPLACED):
            result, worker = known.results[place]
            try:
                return ray.get(result, timeout=self.settings.limit)
            except GetTimeoutError:
                late = self.settings.limit
                ray.kill(worker, no_restart=False)
                self._join(0)
                self.session.terminal.warn(
                    f"workers: no samples of a unit of iteration {known.units[place].iteration + 1}"
                    f" in {late:g} s; another worker is asked"
                )
            except RayActorError as error:
                self.session.terminal.warn(f"workers: a worker is lost ({_first_line(error)})")
            except RayTaskError as error:
                raise _cause(error) from None
            known.results[place] = self._ask(known.units[place], known.version)
        raise UserError(
            f"workers: {REPLACED} workers have not sampled a unit in {self.settings.limit:g} s "
            "each; see `ray status`, or raise workers.limit"
        )

    # The start and the end

    def prove(self) -> None:
        """Wait for each worker, and compare it with this process before it samples: package
        versions, and one draw. UserError if they differ."""
        session = self.session
        self._keep(-1)
        reference = ray.put(self.weights.pop(-1))
        self.joining = {each.trial.remote(-1, reference): each for each in self.actors}
        self.own = all_tensors(brought_to(trial(session), torch.device("cpu")))
        self._join(self.settings.limit)
        away = "to the bit" if self.worst == 0 else f"but for {self.worst:.1e} of its size"
        compared = f"a first draw as here {away}" if self.own else "first draws not compared"
        session.terminal.say(
            f"workers: {len(self.joined)} of {len(self.actors)} sample on Ray, {compared}; "
            f"lag {self.settings.lag}"
        )

    def _join(self, patience: float) -> None:
        """Take in the workers that have started by now; wait for one of them at most so long."""
        waiting = [*self.joining]
        done, _ = ray.wait(waiting, num_returns=1, timeout=patience) if waiting else ([], [])
        if patience and not done:
            raise UserError(
                f"workers: no worker has started in {patience:g} s; see `ray status` for what the "
                "cluster lacks, or raise workers.limit"
            )
        more = [each for each in waiting if each not in done]
        done += ray.wait(more, num_returns=len(more), timeout=0)[0] if more else []
        for result in done:
            worker = self.joining.pop(result)
            self._compare(result)
            self.joined.append(worker)

    def _compare(self, result: Any) -> None:
        try:
            theirs, rollouts = ray.get(result)
        except RayTaskError as error:
            raise _cause(error) from None
        except RayError as error:
            raise UserError(f"workers: a worker could not start: {_first_line(error)}") from error
        here = facts()
        for name in (name for name in here if theirs.get(name) != here[name]):
            raise UserError(
                f"workers: a worker has {name} {theirs.get(name)}, this process {here[name]}; "
                "install the same versions on all machines"
            )
        away = relative_distance(self.own, all_tensors(rollouts))
        if not away <= SAME:
            raise UserError(
                f"workers: a draw that a worker sampled differs from this process's by {away:.1e} "
                "of its size: use the same kind of device, dtype and model files everywhere"
            )
        self.worst = max(self.worst, away)

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        if self.ours:
            ray.shutdown()

    # Checkpoints

    def state(self, iteration: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        ahead = {k: each for k, each in self.started.items() if k >= iteration}
        kept = {each.version for each in ahead.values()}
        numbers = {str(k): {"draws": list(each.draws), "version": each.version}
                   for k, each in ahead.items()}  # fmt: skip
        tensors = {
            f"{version}/{name}": weight
            for version in kept
            for name, weight in self.weights[version].items()
        }
        return numbers, tensors

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        for key, weight in weights.items():
            version, name = key.split("/", 1)
            self.weights.setdefault(int(version), {})
            self.weights[int(version)] = {**self.weights[int(version)], name: weight}
        for key, each in state.items():
            draws = Draws(*(tuple(part) for part in each["draws"]))
            mine, _ = self.session.parallel.share(len(draws.ids))
            ids, rows = (part[mine.start : mine.stop] for part in (draws.ids, draws.rows))
            units = units_of(self.session, SamplingUnit(int(key), ids, rows))
            self.started[int(key)] = Started(draws, int(each["version"]), units)


def relative_distance(own: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Largest difference between the tensors of two draws, relative to their size."""
    worst = 0.0
    for here, there in zip(own, other, strict=True):
        if here.shape != there.shape:
            return math.inf
        if here.numel():
            scale = here.double().abs().amax().clamp(min=1e-12)
            worst = max(worst, float((here.double() - there.double()).abs().amax() / scale))
    return worst


def _cause(error: RayTaskError) -> Exception:
    """The error of a worker as this process would have raised it."""
    cause: Any = error.cause
    if isinstance(cause, UserError | CallTooLarge):
        return cause
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
