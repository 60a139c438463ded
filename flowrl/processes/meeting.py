"""The rendezvous of a run's processes: each waits a limited time for the others."""

import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.distributed_c10d import _set_pg_timeout

from flowrl.errors import UserError

T = TypeVar("T")

MEETING_VARIABLE = "FLOWRL_MEETING_SECONDS"
MEETING_SECONDS = 120.0  # processes of one command start within seconds of each other


def meet(cpu: bool) -> PartialState:
    """Start the process group if the environment names other processes.

    UserError if the other processes have not joined within MEETING_SECONDS, or the seconds in the
    variable FLOWRL_MEETING_SECONDS: without a launcher nothing else would notice that a process has
    died. Later waits have torch's own limits.
    """
    met, seconds = dist.is_initialized(), _seconds()
    try:
        left = seconds if met else _reach_store(seconds)
        state = PartialState(cpu=cpu, timeout=timedelta(seconds=left))
    except (dist.DistError, RuntimeError, OSError) as error:
        at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        count, rank = os.environ.get("WORLD_SIZE", "?"), os.environ.get("RANK", "?")
        raise UserError(
            f"process {rank} waited {seconds:g} s at {at}, but not all {count} processes of "
            f"this run arrived ({' '.join(str(error).split())[:200]}); read the output of the "
            "others, and start all of them again. If they start at different times, set "
            f"{MEETING_VARIABLE}"
        ) from error
    if dist.is_initialized() and not met:
        nccl = default_pg_nccl_timeout if state.backend == "nccl" else None
        _set_pg_timeout(nccl or default_pg_timeout)
    return state


def agreed(
    state: PartialState, do: Callable[[], T], undo: Callable[[T], object] = lambda _: None
) -> T:
    """Run `do` on the main process; broadcast its result or its UserError to all.

    UserError if another process has ended, after the main process has undone its result with
    `undo`.
    """
    box: list[Any] = [None, ""]
    if state.is_main_process:
        try:
            box[0] = do()
        except UserError as error:
            box[1] = str(error)
    done = state.is_main_process and not box[1]
    with not_alone(lambda: undo(box[0]) if done else None):
        broadcast_object_list(box)
    if box[1]:
        raise UserError(box[1])
    return box[0]


@contextmanager
def not_alone(undo: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Raise a UserError, after `undo`, if a collective inside fails because a process died."""
    try:
        yield
    except Exception as error:
        if not lost(error):
            raise
        undo()
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


def _reach_store(seconds: float) -> float:
    """Wait until the store at MASTER_ADDR answers; return the remaining seconds. OSError if it
    never does. torch's own client waits up to three times as long, and prints a traceback."""
    names = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK")
    given = [os.environ.get(name, "") for name in names]
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    opens_it = given[-1] == "0" and not of_launcher
    if not all(given) or opens_it or not given[2].isdecimal():
        return seconds
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            socket.create_connection((given[1], int(given[2])), max(min(left, 5.0), 0.1)).close()
            return max(end - time.monotonic(), 1.0)
        except OSError:
            if left <= 0:
                raise
            time.sleep(0.2)


def _seconds() -> float:
    """Seconds to wait. UserError if the variable's value is not a positive number."""
    given = os.environ.get(MEETING_VARIABLE, str(MEETING_SECONDS))
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"{MEETING_VARIABLE} must be a number of seconds above 0, not {given!r}")
    return seconds
