"""The meeting of a run's processes: each waits a bounded time for the others."""

import math
import os
from datetime import timedelta

import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.distributed_c10d import _set_pg_timeout

from flowrl.errors import UserError

MEETING_VARIABLE = "FLOWRL_MEETING_SECONDS"
MEETING_SECONDS = 120.0  # processes of one command start within seconds of each other


def meet(cpu: bool) -> PartialState:
    """Start the process group, if the environment names other processes.

    A partner that died before is missed after MEETING_SECONDS, or as many seconds as the variable
    FLOWRL_MEETING_SECONDS says: without a launcher nobody else would tell. Later waits have torch's
    own limits again. UserError if not all are there in time.
    """
    met, seconds = dist.is_initialized(), _seconds()
    try:
        state = PartialState(cpu=cpu, timeout=timedelta(seconds=seconds))
    except (dist.DistError, RuntimeError) as error:
        at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        count, rank = os.environ.get("WORLD_SIZE", "?"), os.environ.get("RANK", "?")
        raise UserError(
            f"process {rank} waited {seconds:g} s at {at}, and the {count} processes of this run "
            f"have not met ({' '.join(str(error).split())[:200]}); read what the others printed, "
            f"and start all of them again. If they start minutes after each other, set "
            f"{MEETING_VARIABLE}"
        ) from error
    if dist.is_initialized() and not met:
        nccl = default_pg_nccl_timeout if state.backend == "nccl" else None
        _set_pg_timeout(nccl or default_pg_timeout)
    return state


def _seconds() -> float:
    """Seconds to wait. UserError for a value of the variable that is no positive number."""
    given = os.environ.get(MEETING_VARIABLE, str(MEETING_SECONDS))
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"{MEETING_VARIABLE}: {given!r} is not a number of seconds above 0")
    return seconds
