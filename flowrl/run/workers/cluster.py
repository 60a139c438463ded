"""Ray for a run: started on this machine or joined, with the replicas of rewards."""

import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray  # type: ignore[reportMissingImports]
import torch
from accelerate import PartialState
from ray.exceptions import RayActorError, RayError  # type: ignore[reportMissingImports]

from flowrl.errors import UserError
from flowrl.processes.meeting import agreed
from flowrl.run.workers.head import RayHead, address_of
from flowrl.run.workers.scoring import ReplicatedReward, ScoringWorker, first_line
from flowrl.run.workers.transport import send_tensors_whole
from flowrl.settings import RunSettings
from flowrl.settings.read import dump

# Any: ray.init has a type for each of its options
RAY_OPTIONS: dict[str, Any] = {
    "include_dashboard": False, "log_to_driver": False, "configure_logging": False
}  # fmt: skip
NICENESS = "RAY_worker_niceness"  # Ray's own setting: 15 unless it is set


class Cluster:
    """A connection to Ray. The main process starts or joins it, and starts the replicas of rewards;
    the other processes of the run join it."""

    def __init__(self, run: RunSettings, state: PartialState) -> None:
        self.run, self.main = run, state.is_main_process
        self.ours = self.main and not ray.is_initialized()
        self.replicas: list[Any] = []  # an actor ends with the first handle of it
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
                ray.init(address=address, namespace=namespace, **RAY_OPTIONS, **priority(address))
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
        return f"{ray.get_runtime_context().gcs_address} {namespace}"

    def _rewards(self, namespace: str) -> dict[str, ReplicatedReward]:
        """The rewards that have replicas. UserError for a reward that cannot be opened."""
        rewards: dict[str, ReplicatedReward] = {}
        for label, placement in self.run.workers.rewards.items():
            names = [f"{label}-{number}" for number in range(placement.replicas)]
            replicas = [ray.get_actor(name, namespace=namespace) for name in names]
            for replica in replicas:
                self._ready(label, replica)
            rewards[label] = ReplicatedReward(label, replicas, self.run.workers.limit)
        return rewards

    def _ready(self, label: str, replica: Any) -> None:
        limit = self.run.workers.limit
        try:
            ray.get(replica.score.remote(()), timeout=limit)
        except RayActorError as error:
            raise UserError(f"workers.rewards: {label}: {why_not_started(error)}") from error
        except RayError as error:
            raise UserError(
                f"workers.rewards: no replica of {label} has started in {limit:g} s "
                f"({first_line(error)}); see `ray status` for missing resources"
            ) from error

    def close(self) -> None:
        """End the replicas, and Ray if it was started here."""
        self.head.close()
        for replica in self.replicas:
            with suppress(RayError):
                ray.kill(replica)
        if self.ours or not self.main:
            ray.shutdown()


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


def why_not_started(error: RayActorError) -> str:
    """The error that an actor's constructor raised, or Ray's message."""
    cause: Any = getattr(error, "cause", None)
    raised: Any = getattr(cause, "cause", cause)
    return str(raised) if isinstance(raised, UserError) else first_line(error)


def versions_differ(versions: Mapping[str, str], worker_versions: Mapping[str, str]) -> str | None:
    """A sentence if package versions differ."""
    for name, version in versions.items():
        if worker_versions.get(name) != version:
            return (
                f"a worker has {name} {worker_versions.get(name)}, this process {version}; "
                "install the same versions on all machines"
            )
    return None
