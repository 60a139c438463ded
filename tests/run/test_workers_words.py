"""What is said of a worker that could not start, where it needs no Ray."""

import errno
import pickle
import re
from pathlib import Path

import pytest
import torch

from flowrl.errors import NotFiniteError, UserError
from flowrl.models.call_sizes import CallTooLarge
from flowrl.run.workers.causes import (
    error_of_worker,
    kernel_kills,
    last_line_with_words,
    opening_error,
    sendable,
)


class OfTwo(Exception):
    """It cannot be made again from its message."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


class OwnMistake(UserError):
    """A user's kind of UserError."""


class OwnMemory(MemoryError):
    """A user's kind of MemoryError."""


CHANGED = {
    "of two": (OfTwo("this", "that"), RuntimeError, "^OfTwo: this and that$"),
    "missing": (ModuleNotFoundError("No module named 'x'"), RuntimeError, "Error: No module named"),
    "sys.exit": (SystemExit("it asked to end"), RuntimeError, "^SystemExit: it asked to end$"),
    "a user's own": (OwnMistake("set x"), UserError, "^set x$"),
    "its memory": (OwnMemory("of the judge"), torch.OutOfMemoryError, "^of the judge$"),
    "a disk": (
        type("OwnDisk", (OSError,), {})(errno.ENOSPC, "No space left", "/weights"),
        OSError,
        "No space left.*/weights",
    ),
    "a port": (PermissionError(errno.EACCES, "denied", "/x"), RuntimeError, "^PermissionError: "),
}
KEPT = [
    UserError("set workers.limit"),
    NotFiniteError("a sample is NaN"),
    CallTooLarge(frozenset({"sampling"}), "CUDA out of memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    OSError(errno.ENOSPC, "No space left on device", "/tmp/x"),
]


@pytest.mark.parametrize("cause", CHANGED)
def test_an_error_that_no_other_process_could_read_travels_as_words(cause):
    error, kind, said = CHANGED[cause]
    with pytest.raises(Exception) as sent, sendable():
        raise error
    received = pickle.loads(pickle.dumps(sent.value))
    assert type(received) is kind and re.search(said, str(received))


@pytest.mark.parametrize("error", KEPT, ids=lambda error: type(error).__name__)
def test_an_error_with_an_answer_keeps_its_kind(error):
    with pytest.raises(type(error)) as sent, sendable():
        raise error
    assert sent.value is error


OPENED = {
    "words": (RuntimeError("OfTwo: a\nb"), UserError, "^workers: a worker could not .*: Of.*a b; "),
    "a mistake": (UserError("reward x: no y"), UserError, "^workers: in a worker: reward x: no y$"),
    "memory": (torch.OutOfMemoryError("CUDA"), torch.OutOfMemoryError, "^in a worker: CUDA$"),
    "not finite": (NotFiniteError("NaN"), NotFiniteError, "^NaN$"),
    "a disk": (OSError(errno.ENOSPC, "full", "/x"), UserError, "^workers: in a worker: .*/x: full"),
}  # fmt: skip


@pytest.mark.parametrize("cause", OPENED)
def test_the_cause_is_in_the_sentence_of_a_worker_that_could_not_open(cause):
    error, kind, said = OPENED[cause]
    told = opening_error(error_of_worker(error, "its traceback"), "workers", "the model")
    assert type(told) is kind and re.search(said, str(told)), str(told)
    if cause == "words":
        assert told.__notes__ == ["in a worker: its traceback"]


def test_last_line_with_words_are_no_frames_and_no_numbers(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text('a library said: no such device\n  File "x.py", line 3\n[x] : 1\n@ 0x7\n12\n')
    assert last_line_with_words(log) == "a library said: no such device"
    assert last_line_with_words(tmp_path / "missing") == ""
    log.write_bytes(b"\xff" * 50_000 + b"\nkilled\n")
    assert last_line_with_words(log) == "killed"


def test_the_kernel_s_count_of_kills(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 12\noom_kill 3\n")
    assert kernel_kills(counters) == 3
    counters.write_text("pgfault 12\n")
    assert kernel_kills(counters) is None is kernel_kills(tmp_path / "missing")
