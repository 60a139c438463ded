"""Errors of workers as the training process raises them. Nothing here needs Ray."""

import errno
from typing import Any

import torch

from flowrl.errors import UserError, write_fault
from flowrl.models.call_sizes import CallTooLarge, out_of_memory

OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def error_of_worker(cause: Any, said: str) -> Exception:
    """The error to raise for one of a worker: of the same kind where this process has an answer to
    it (other settings, smaller calls, less memory, a full disk), otherwise RuntimeError.

    cause  the worker's error, or anything else if it could not be sent
    said   the worker's own words, with its traceback
    """
    if isinstance(cause, UserError | CallTooLarge):
        return cause
    error: Exception
    if isinstance(cause, Exception) and out_of_memory(cause):
        error = torch.OutOfMemoryError(f"in a worker: {str(cause) or type(cause).__name__}")
    elif isinstance(cause, OSError) and cause.errno in OF_A_DISK:
        file = "a file" if cause.filename is None else cause.filename
        error = UserError(f"workers: on a worker's machine, {file}: {write_fault(cause)}")
    else:
        return RuntimeError(f"in a worker: {said}")
    error.add_note(said)
    return error
