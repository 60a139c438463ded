"""Standard output and error of a training, which outlive their terminal.

A closed ssh ends the terminal, and with it often the program that reads a pipe, before the training
has saved. Whatever prints then would raise an error, in the middle of an iteration or of the save.
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator

GONE = {errno.EIO, errno.EPIPE}  # of a terminal, of a pipe
_reader_gone: set[int] = set()  # numbers of pipes that nobody reads any more


class Steady(io.FileIO):
    """Writes to an open file, and into nothing once its terminal or its reader has gone."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)

    def write(self, data, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            if error.errno == errno.EPIPE:
                _reader_gone.add(self.fileno())
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())  # for libraries that write there themselves
            os.close(nothing)
            return memoryview(data).nbytes


def outlive_terminal() -> None:
    """Let standard output and error outlive their terminal, where they are open files."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and _number(stream) == number:
            stream.flush()
            steady = io.TextIOWrapper(
                io.BufferedWriter(Steady(number)),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=number == 2 or stream.line_buffering,
            )
            setattr(sys, name, steady)


def _number(stream: io.TextIOWrapper) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # a test's, or closed
        return None


def reader_gone() -> bool:
    """Whether the program has gone that read the standard output."""
    return 1 in _reader_gone


def ending_signals() -> Iterator[signal.Signals]:
    """The signals that end a training. SIGHUP that is ignored, as under nohup, stays ignored."""
    yield from (signal.SIGINT, signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        yield signal.SIGHUP
