"""Ray for a run: started on this machine or joined, with the replicas of rewards."""

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray  # type: ignore[reportMissingImports]
import torch
from accelerate import PartialState
from ray.exceptions import (  # type: ignore[reportMissingImports]
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from flowrl.errors import UserError
from flowrl.models.out_of_memory import out_of_memory
from flowrl.processes.meeting import agreed
from flowrl.run.workers.causes import opening_error
from flowrl.run.workers.head import RayHead, address_of
from flowrl.run.workers.opening import Opening, cause_of, first_line
from flowrl.run.workers.scoring import ReplicatedReward, ScoringWorker
from flowrl.run.workers.transport import send_tensors_whole
from flowrl.settings import RunSettings
from flowrl.settings.read import dump

# Any: ray.init has a type for each of its options
RAY_OPTIONS: dict[str, Any] = {
    "include_dashboard": False, "log_to_driver": False, "configure_logging": False
}  # fmt: skip
NICENESS = "RAY_worker_niceness"  # Ray's own setting: 15 unless it is set
ATTEMPTS = "RAY_gcs_server_port_wait_time_s"  # Ray's own, to reach a head; each takes about 35 s


class Cluster:
    """A connection to Ray. The main process starts or joins it, and starts the replicas of rewards;
    the other processes of the run join it."""

    def __init__(self, run: RunSettings, state: PartialState) -> None:
        self.run, self.main = run, state.is_main_process
        self.ours = self.main and not ray.is_initialized()
        self.replicas: list[Any] = []  # an actor ends with the first handle of it
        self.openings: dict[str, Opening] = {}  # of those, by name
        place = agreed(state, self._open)
        if not ray.is_initialized():
            address, _, namespace = place.partition(" ")
            ray.init(address=address, namespace=namespace, **RAY_OPTIONS)
        send_tensors_whole()
        self.rewards = self._rewards(place.partition(" ")[2])
        self.head = RayHead(ray.get_runtime_context().gcs_address)

    def _open(self) -> str:
        """Start or join Ray and start the replicas; returns the address and the namespace."""
        namespace = f"flowrl-{uuid.uuid4().hex}"
        address = address_of(self.run.workers)
        if self.ours:
            try:
                with one_attempt(address):
                    ray.init(
                        address=address, namespace=namespace, **RAY_OPTIONS, **priority(address)
                    )
            except (ConnectionError, ValueError) as error:
                raise UserError(
                    f"workers.address: {address} is not a Ray cluster ({first_line(error)}); "
                    "start one with `ray start --head`, or leave workers.address out"
                ) from error
        tree, threads = dump(self.run), torch.get_num_threads()
        for label, placement in self.run.workers.rewards.items():
            for number in range(placement.replicas):
                name = f"{label}-{number}"
                named: dict[str, Any] = {
                    "name": name,
                    "namespace": namespace,
                    "max_task_retries": -1,
                }
                replica = actor(ScoringWorker, placement.gpus, **named)
                self.replicas.append(replica.remote(tree, label, threads))
                self.openings[name] = Opening(self.replicas[-1])  # all at once
        return f"{ray.get_runtime_context().gcs_address} {namespace}"

    def _rewards(self, namespace: str) -> dict[str, ReplicatedReward]:
        """The rewards that have replicas. UserError for a reward that cannot be opened."""
        rewards: dict[str, ReplicatedReward] = {}
        for label, placement in self.run.workers.rewards.items():
            names = [f"{label}-{number}" for number in range(placement.replicas)]
            replicas = [ray.get_actor(name, namespace=namespace) for name in names]
            for name, replica in zip(names, replicas, strict=True):
                self._ready(label, self.openings.get(name) or Opening(replica))
            rewards[label] = ReplicatedReward(label, replicas, self.run.workers.limit)
        return rewards

    def _ready(self, label: str, opening: Opening) -> None:
        """Wait until a replica has opened its reward. UserError, with the cause, if it cannot."""
        place, limit = f"workers.rewards: {label}", self.run.workers.limit
        try:
            ray.get(opening.opened, timeout=limit)
        except RayTaskError as error:
            cause = cause_of(error)
            if out_of_memory(cause):
                raise UserError(
                    f"{place}: out of memory while a replica opened it ({first_line(cause)}); use "
                    "fewer replicas, or a machine or GPU with more memory for each"
                ) from cause
            raise opening_error(cause, place, "the reward") from error
        except GetTimeoutError as error:
            raise UserError(f"{place}: a replica {opening.why_late(limit)}") from error
        except RayActorError as error:
            raise UserError(f"{place}: a replica {opening.why_ended(error)}") from error
        except RayError as error:
            raise UserError(f"{place}: a replica could not start: {first_line(error)}") from error

    def close(self) -> None:
        """End the replicas, and Ray if it was started here."""
        self.head.close()
        for replica in self.replicas:
            with suppress(RayError):
                ray.kill(replica)
        if self.ours or not self.main:
            ray.shutdown()


@contextmanager
def one_attempt(address: str) -> Iterator[None]:
    """Let Ray try once, rather than for 12 minutes, to reach the head of a cluster that is not
    there, unless the user has set how often."""
    if address == "local" or ATTEMPTS in os.environ:
        yield
        return
    os.environ[ATTEMPTS] = "1"
    try:
        yield
    finally:
        del os.environ[ATTEMPTS]


def priority(address: str) -> dict[str, Any]:
    """Ray's option for workers as important as training, if Ray is started here and the user has
    not set their niceness."""
    if address != "local" or NICENESS in os.environ:
        return {}
    return {"_system_config": {"worker_niceness": 0}}


def actor(kind: type, gpus: float, **more: Any) -> Any:
    """An actor class that Ray spreads over nodes, and restarts after a crash."""
    return ray.remote(kind).options(  # type: ignore[reportUnknownMemberType]
        num_cpus=0, num_gpus=gpus, scheduling_strategy="SPREAD", max_restarts=-1, **more
    )


def versions_differ(versions: Mapping[str, str], worker_versions: Mapping[str, str]) -> str | None:
    """A sentence if package versions differ."""
    for name, version in versions.items():
        if worker_versions.get(name) != version:
            return (
                f"a worker has {name} {worker_versions.get(name)}, this process {version}; "
                "install the same versions on all machines"
            )
    return None
