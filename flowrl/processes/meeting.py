"""The rendezvous of a run's processes: each waits a limited time for the others."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.distributed_c10d import _set_pg_timeout

from flowrl.errors import UserError, after
from flowrl.processes.store import (
    Launch,
    NotMet,
    StorePlace,
    check_launcher_variables,
    name_attempt,
    restarts,
)
from flowrl.processes.watch import Board, Watch, hang_seconds, seconds_of, watching

T = TypeVar("T")

MEETING_VARIABLE = "FLOWRL_MEETING_SECONDS"
MEETING_SECONDS = 120.0  # processes of one command start within seconds of each other
FOREVER = timedelta(days=365)  # torch has no word for it
_NOT_MET = (
    "read the output of the others, and start all of them again. If they start at different times, "
    f"set {MEETING_VARIABLE}"
)


@dataclass(frozen=True)
class Meeting:
    """The meeting of the processes of this run.

    store   for what they say to each other beside the process group, under this attempt's name;
            None without a launcher
    launch  what the launcher's attempts have in common
    keeper  the process that keeps the store; None if the launcher does
    """

    store: Store | None
    launch: Launch
    keeper: int | None = None


_MET: list[Meeting] = []  # at most one, like the process group of torch and accelerate


def meeting() -> Meeting:
    """The meeting of this process with the others; call `meet` before."""
    (met,) = _MET
    return met


def meet(cpu: bool) -> PartialState:
    """Start the process group if the environment names other processes.

    UserError if the variables that name them are not complete, or if the others have not joined
    within MEETING_SECONDS, or the seconds in the variable FLOWRL_MEETING_SECONDS: without a
    launcher nothing else would notice that a process has died. Later waits end as
    `flowrl.processes.watch` says.
    """
    check_launcher_variables()
    hang_seconds()  # also where there is nobody to wait for: the next start may have others
    seconds, began, place = _seconds(), time.monotonic(), StorePlace.given()
    if dist.is_initialized():
        _MET[:] = _MET or [Meeting(None, Launch(None, (restarts(),)))]
        return PartialState(cpu=cpu)
    store, options = None, dict[str, Any]()
    try:
        if place is not None and (place.size > 1 or place.of_agent):
            store = place.open(seconds)
            left = began + seconds - time.monotonic()
            name = name_attempt(store, place.rank, place.size, max(left, 1.0))
            own_store = PrefixStore(name, store)
            options = {"store": own_store, "rank": place.rank, "world_size": place.size}
        left = max(began + seconds - time.monotonic(), 1.0)
        state = PartialState(cpu=cpu, timeout=timedelta(seconds=left), **options)
    except NotMet as missing:
        raise UserError(
            f"process {_variable('RANK')} waited {seconds:g} s at {_address()}, but not all "
            f"{_variable('WORLD_SIZE')} processes of this run arrived ({missing}); {_NOT_MET}"
        ) from missing
    except (dist.DistError, RuntimeError, OSError) as error:
        raise UserError(
            f"process {_variable('RANK')} could not meet the {_variable('WORLD_SIZE')} processes "
            f"of this run at {_address()}: after {time.monotonic() - began:.1f} s it failed with "
            f"{' '.join(str(error).split())[:200]}; {_NOT_MET}"
        ) from error
    if dist.is_initialized():
        _set_pg_timeout(_longest_wait(state.backend))
    of_agent = place is not None and place.of_agent
    counts = () if of_agent else gather_object([restarts()])
    _MET[:] = [
        Meeting(
            None if store is None else PrefixStore("meeting", options["store"]),
            Launch(store if of_agent else None, tuple(counts)),
            None if of_agent else 0,
        )
    ]
    return state


def watched_processes(state: PartialState) -> AbstractContextManager[None]:
    """Context in which the processes know of each other while they wait."""
    met, size = meeting(), state.num_processes
    if met.store is None or size == 1:
        return nullcontext()
    board = Board(met.store, state.process_index, size)
    return watching(Watch(board, met.keeper, hang_seconds()))


def agreed(
    state: PartialState, do: Callable[[], T], undo: Callable[[T], object] = lambda _: None
) -> T:
    """Run `do` on the main process; broadcast its result or its UserError to all.

    UserError if another process has ended, after the main process has undone its result with
    `undo`.
    """
    box: list[Any] = [None, None]
    if state.is_main_process:
        try:
            box[0] = do()
        except UserError as error:
            box[1] = error
    done = state.is_main_process and box[1] is None
    with not_alone(lambda: undo(box[0]) if done else None):
        broadcast_object_list(box)
    if box[1] is not None:
        raise box[1]
    return box[0]


@contextmanager
def not_alone(undo: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Raise a UserError, after `undo`, if a collective inside fails because a process died."""
    try:
        yield
    except Exception as error:
        if not lost(error):
            raise
        after(error, undo, None)
        raise UserError(
            f"another process of this run ended before training began "
            f"({' '.join(str(error).split())[:200]}); read its output, and start all processes "
            "again"
        ) from error


def lost(error: Exception) -> bool:
    """Whether a collective failed because a process died. gloo reports that only in its message."""
    text = str(error).lower()
    words = ("connection closed by peer", "connection reset by peer", "connection refused")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


def _longest_wait(backend: str | None) -> timedelta:
    """The time for which torch lets a process wait for the others.

    torch cannot know whether they work, so the run's own watch ends what hangs. NCCL's limit stays:
    its calls also hang on a broken network, and then no process is at fault.
    """
    if backend is not None and "nccl" in backend:
        return max(default_pg_nccl_timeout or default_pg_timeout, timedelta(seconds=hang_seconds()))
    return FOREVER


def _variable(name: str) -> str:
    return os.environ.get(name, "?")


def _address() -> str:
    return f"{_variable('MASTER_ADDR')}:{_variable('MASTER_PORT')}"


def _seconds() -> float:
    """Seconds to wait for the others. UserError if the variable's value is not a positive
    number."""
    return seconds_of(MEETING_VARIABLE, MEETING_SECONDS)
