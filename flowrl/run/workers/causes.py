"""Errors of workers as the training process raises them. Nothing here needs Ray."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flowrl.errors import UserError, write_fault
from flowrl.models.call_sizes import CallTooLarge
from flowrl.models.out_of_memory import out_of_memory

OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
READABLE = ("flowrl", "rewards", "samplers", "ray")  # packages whose errors every process can read
LAST_BYTES = 20_000  # of a worker's log


@contextmanager
def sendable() -> Iterator[None]:
    """Raise an error of a worker as one that any process can read.

    An exception whose class stands in a user's file, or that cannot be made again from its
    arguments, would reach the training process as an error of its transport, without the cause. So
    an error that the training process has an answer to keeps its kind (`error_of_worker`), and
    every other one travels as its name and its words. `sys.exit` is one of them: Ray would end the
    process, and start it again without a word.
    """
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error.code}") from error
    except Exception as error:
        readable = type(error).__module__.partition(".")[0] in READABLE
        if readable or type(error) in (torch.OutOfMemoryError, MemoryError, RuntimeError, OSError):
            raise
        words = str(error).strip()
        if isinstance(error, UserError):
            raise UserError(words) from error
        if out_of_memory(error):
            raise torch.OutOfMemoryError(words or type(error).__name__) from error
        if isinstance(error, OSError) and error.errno in OF_A_DISK:
            raise OSError(error.errno, error.strerror, error.filename) from error
        raise RuntimeError(f"{type(error).__name__}: {words}") from error


def opening_error(error: Exception, place: str, parts: str) -> Exception:
    """The error to raise where a worker could not open what it needs.

    error  of `error_of_worker`
    place  of the settings that started the worker
    parts  that it opens
    """
    if type(error) is UserError:
        return UserError(f"{place}: in a worker: {error}")
    if isinstance(error, UserError) or out_of_memory(error):
        return error
    cause = error.__cause__ or error
    words = " ".join(str(cause).split())
    sentence = UserError(
        f"{place}: a worker could not open {parts}: {words}; workers need the same packages, files "
        "and environment as this process"
    )
    sentence.add_note(str(error))
    return sentence


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
        error = RuntimeError(f"in a worker: {said}")
        error.__cause__ = cause if isinstance(cause, Exception) else None
        return error
    error.add_note(said)
    return error


def kernel_kills(counters: Path = Path("/proc/vmstat")) -> int | None:
    """Processes that this machine's kernel has killed for want of memory; None if it does not
    say."""
    try:
        lines = counters.read_text().splitlines()
    except OSError:
        return None
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


def last_line_with_words(log: Path) -> str:
    """The last line of a worker's log that has words, without a stack's frames; empty if there is
    none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalpha, line))]
    plain = [line for line in lines if not line.startswith(("File ", "@", "[", "PC:"))]
    return plain[-1][:200] if plain else ""
