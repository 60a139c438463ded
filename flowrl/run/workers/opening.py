"""The opening of a worker's parts, of which Ray's own messages say little: whether the worker has
started, has died while it opened them, or still opens them."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray  # type: ignore[reportMissingImports]
from ray.exceptions import RayActorError, RayError, RayTaskError  # type: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # type: ignore[reportMissingImports]
    NodeAffinitySchedulingStrategy,
)

from flowrl.errors import after
from flowrl.run.workers.causes import error_of_worker, kernel_kills, last_line_with_words

OPENING_DEATHS = 3  # of a worker that opens its parts, until the run says so
ASKING_SECONDS = 10.0  # for what a machine knows of a worker that has died


@dataclass(frozen=True)
class Birth:
    """A worker's process, before it opens anything.

    kills  of the machine's kernel, for want of memory
    log    its own; None if it does not know
    """

    pid: int
    node: str
    address: str
    kills: int | None
    log: str | None


def birth() -> Birth:
    """The birth of this process, a worker's."""
    try:
        log = os.readlink("/proc/self/fd/2")  # Ray makes it a file
    except OSError:
        log = None
    node = ray.get_runtime_context().get_node_id()
    return Birth(os.getpid(), node, ray.util.get_node_ip_address(), kernel_kills(), log)


@dataclass
class Opening:
    """A worker that opens its parts.

    worker  an actor with the methods `birth` and `open`
    opened  the reference of the result of `open`; Ray asks a worker that dies again, for
            OPENING_DEATHS - 1 times
    """

    worker: Any
    born: Any = field(init=False)
    opened: Any = field(init=False)

    def __post_init__(self) -> None:
        self.born = self.worker.birth.options(max_task_retries=-1).remote()
        self.opened = self.worker.open.options(max_task_retries=OPENING_DEATHS - 1).remote()

    def birth(self) -> Birth | None:
        """The birth of the worker's first process; None if it has no place on the cluster yet."""
        finished, _ = ray.wait([self.born], timeout=0)
        if not finished:
            return None
        try:
            return ray.get(self.born)
        except RayError:
            return None

    def why_ended(self, error: RayActorError) -> str:
        """Why a worker's process has ended while it opened its parts, as a clause."""
        if error.actor_init_failed:  # its class could not be imported
            last = [line for line in str(error).splitlines() if line.strip()][-1]
            return f"could not start: {last.strip()}; install the same packages on all machines"
        clause, first = f"ended {OPENING_DEATHS} times while it opened its parts", self.birth()
        if first is None:
            return f"{clause} ({first_line(error)})"
        seen = after(error, lambda: self._seen(first), (None, ""))
        kills, words = seen
        where = f"process {first.pid} on {first.address}"
        if kills is not None and first.kills is not None and kills > first.kills:
            return (
                f"{clause}: it ran out of memory ({where}; its kernel has killed "
                f"{kills - first.kills} processes meanwhile); use fewer workers or a machine with "
                "more memory"
            )
        said = f", whose last words were: {words}" if words else ""
        log = f"; its log is {first.log}" if first.log else ""
        return (
            f"{clause}: its process was killed, ran out of memory or crashed outside Python "
            f"({where}{said}){log}"
        )

    def _seen(self, first: Birth) -> tuple[int | None, str]:
        """The kernel's count now, and the last words of the log, both of the worker's machine."""
        on_its_node = NodeAffinitySchedulingStrategy(first.node, soft=False)
        look = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_its_node)(look_at)
        return ray.get(look.remote(first.log), timeout=ASKING_SECONDS)

    def why_late(self, seconds: float) -> str:
        """Why a worker has not opened its parts in this time, as a clause."""
        first = self.birth()
        if first is None:
            return f"has not started in {seconds:g} s; see `ray status` for what the cluster lacks"
        return (
            f"has not opened its parts in {seconds:g} s (process {first.pid} on {first.address}): "
            "raise workers.limit if that is slow, or see where it hangs with "
            f"`py-spy dump --pid {first.pid}` there"
        )


def look_at(log: str | None) -> tuple[int | None, str]:
    return kernel_kills(), "" if log is None else last_line_with_words(Path(log))


def cause_of(error: RayTaskError) -> Exception:
    """The error of a worker as this process would have raised it; RayError if an object that it
    needed is lost."""
    cause: Any = error.cause
    return cause if isinstance(cause, RayError) else error_of_worker(cause, str(error))


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
