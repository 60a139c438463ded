"""The sampling workers of one training process: which have joined, which is next, which are
lost."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray  # type: ignore[reportMissingImports]
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError  # type: ignore[reportMissingImports]
from torch import Tensor

from flowrl.errors import UserError
from flowrl.run.workers.causes import opening_error
from flowrl.run.workers.cluster import Cluster, actor, versions_differ
from flowrl.run.workers.opening import Opening, cause_of, first_line
from flowrl.run.workers.sampler import SamplingWorker, facts, trial
from flowrl.run.workers.transport import all_tensors, brought_to
from flowrl.session.session import Session
from flowrl.settings.read import dump

SAME = 1e-3  # largest difference of a worker's first draw, of the size of its numbers


class Crew:
    """Sampling workers join once they have started, at any iteration, and again after they were
    lost; each is first compared with this process."""

    def __init__(self, session: Session, cluster: Cluster) -> None:
        run, parallel = session.run, session.parallel
        self.session, self.settings = session, run.workers
        gpus = self.settings.gpus
        cls = actor(SamplingWorker, float(parallel.device == "cuda") if gpus is None else gpus)
        share = range(parallel.rank, self.settings.sampling, parallel.processes)
        tree, threads = dump(run), torch.get_num_threads()
        self.actors: list[Any] = [cls.remote(tree, threads, cluster.rewards) for _ in share]
        self.joined: list[Any] = []  # those that have passed the comparison, in turn
        self.joining: dict[Any, Opening] = {}  # by the reference of what it opens
        self.failed: dict[Any, str] = {}  # workers that have died as they opened -> why
        self.nodes: dict[Any, str] = {}  # of those that have joined
        self.own: list[Tensor] = []  # this process's first draw
        self.worst, self.turn, self.restarts = 0.0, 0, 0

    def begin(self) -> None:
        """Wait for a worker. UserError if it differs from this process."""
        session = self.session
        for sampler in self.actors:
            self._ask(sampler)
        with session.parallel.together():
            self.own = all_tensors(brought_to(trial(session), torch.device("cpu")))
        self.join(self.settings.limit)
        away = "to the bit" if self.worst == 0 else f"up to {self.worst:.1e} of its size"
        compared = (
            (f"first draws equal this process's {away}") if self.own else "first draws not compared"
        )
        session.terminal.say(
            f"workers: {len(self.joined)} of {len(self.actors)} sample on Ray, {compared}; "
            f"lag {self.settings.lag}"
        )

    def next(self) -> Any:
        """The next worker in turn; waits for a worker if all are lost."""
        if not self.joined:
            self.join(self.settings.limit)
        self.turn += 1
        return self.joined[self.turn % len(self.joined)]

    def lost(self, worker: Any, reason: str) -> None:
        """Remove a worker that has died or was ended, and those of nodes that are gone. Ray
        restarts them, and they may join again."""
        if worker not in self.joined:  # another of its units has said so
            return
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        gone = [
            member for member in self.joined if member == worker or self.nodes[member] not in alive
        ]
        self.restarts += len(gone)
        count = "a worker was" if len(gone) == 1 else f"{len(gone)} workers were"
        self.session.terminal.warn(
            f"workers: {count} lost ({reason}); others sample the same draws"
        )
        for member in gone:
            self.joined.remove(member)
            self._ask(member)

    def join(self, patience: float = 0) -> None:
        """Take in the workers that have started. With `patience`, wait that many seconds if there
        is none; UserError afterwards, or as soon as all have died while they opened their parts."""
        end = time.monotonic() + patience
        self._take_in(0)
        while patience and not self.joined:
            if len(self.failed) == len(self.actors):
                raise UserError(f"workers: a worker {next(iter(self.failed.values()))}")
            remaining = end - time.monotonic()
            if remaining <= 0 or not self._take_in(remaining):
                raise UserError(f"workers: {self._why_late(patience)}")

    def _why_late(self, seconds: float) -> str:
        """Why no worker has joined, as a sentence: one that hangs or has died says more than one
        without a place."""
        openings = [
            opening for opening in self.joining.values() if opening.worker not in self.failed
        ]
        placed = [opening for opening in openings if opening.birth() is not None]
        first = next(iter(self.failed.values()), None)
        if first is not None and not placed:
            return f"a worker {first}"
        return f"a worker {(placed or openings)[0].why_late(seconds)}"

    def _take_in(self, patience: float) -> bool:
        """Compare the workers that have started, after waiting for one. Returns whether any has
        started."""
        waiting = [*self.joining]
        if not waiting:
            return False
        count = 1 if patience else len(waiting)
        finished, _ = ray.wait(waiting, num_returns=count, timeout=patience)
        for result in finished:
            self._compare(result, self.joining.pop(result))
        return bool(finished)

    def _ask(self, worker: Any) -> None:
        """Ask a worker to open its parts, which it does when it has started, and for its first
        draw."""
        opening = Opening(worker)
        self.joining[opening.opened] = opening

    def _compare(self, result: Any, opening: Opening) -> None:
        worker = opening.worker
        try:
            worker_facts, node, rollouts = ray.get(result)
        except RayTaskError as error:
            raise opening_error(
                cause_of(error), "workers", "the run's model and rewards"
            ) from error
        except RayActorError as error:
            reason = opening.why_ended(error)
            if error.actor_init_failed:
                raise UserError(f"workers: a worker {reason}") from error
            if worker not in self.failed and self.joined:
                self.session.terminal.warn(f"workers: a worker {reason}; others sample")
            self.failed[worker] = reason
            self._ask(worker)  # on another machine it may succeed
            return
        except RayError as error:
            raise UserError(f"workers: a worker could not start: {first_line(error)}") from error
        self.failed.pop(worker, None)
        wrong = versions_differ(facts(), worker_facts)
        away = relative_distance(self.own, all_tensors(rollouts))
        if wrong is None and not away <= SAME:
            wrong = (
                f"a worker's draw differs from this process's by {away:.1e} of its "
                "size: use the same kind of device, dtype and model files everywhere"
            )
        if wrong is not None and self.settings.differing == "raise":
            raise UserError(f"workers: {wrong}; workers.differing: warn accepts it anyway")
        if wrong is not None:
            self.session.terminal.warn(f"workers: {wrong}")
        self.worst = max(self.worst, away)
        self.nodes[worker] = node
        self.joined.append(worker)

    def close(self) -> None:
        for sampler in self.actors:
            with suppress(RayError):
                ray.kill(sampler)


def relative_distance(local: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest difference of two draws' tensors, relative to the size of their numbers."""
    worst = 0.0
    for tensor, other_tensor in zip(local, other, strict=True):
        if tensor.shape != other_tensor.shape:
            return math.inf
        if tensor.numel():
            scale = tensor.double().abs().amax().clamp(min=1e-12)
            worst = max(
                worst, float((tensor.double() - other_tensor.double()).abs().amax() / scale)
            )
    return worst
