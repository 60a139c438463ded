"""The number of times that the threads which work for a run have waited and then gone on.

A reward that asks a slow server row by row hardly uses its processor, and each look at its thread
finds it at the same place: inside the call that waits. What tells it from one that hangs is that
the kernel has put the thread to sleep, and woken it, once for each row.
"""

import functools
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from flowrl.paths import PROJECT

_POOLS = (os.path.join("concurrent", "futures", "thread.py"), "pool.py")
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")}
    | {os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib")}
)
_OURS = tuple(os.path.join(PROJECT, name, "") for name in ("flowrl", "rewards", "samplers"))


def times_gone_on() -> int:
    """The number of times that the main thread, the threads of pools, and those with code of the
    user have waited for something and gone on. Other threads do not count: a library's own may
    look at something every second for as long as the process lives.

    Only Linux counts this for each thread; 0 elsewhere.
    """
    if sys.platform != "linux":
        return 0
    frames, main = sys._current_frames(), threading.main_thread()
    chosen = [
        thread.native_id
        for thread in threading.enumerate()
        if thread is main or _works(frames.get(thread.ident or 0))
    ]
    return sum(_switches(native) for native in chosen if native is not None)


def _works(frame: FrameType | None) -> bool:
    return any(_of_work(file) for file in _files(frame))


def _files(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


@functools.cache
def _of_work(file: str) -> bool:
    """Whether this file is a pool's, or the user's."""
    if file.endswith(_POOLS):
        return True
    return not file.startswith(("<", *_LIBRARIES, *_OURS))


def _switches(native: int) -> int:
    """Times that a thread gave up its processor by itself; 0 if it has ended."""
    try:
        text = Path(f"/proc/self/task/{native}/status").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in text.splitlines())
    return next((int(words[1]) for words in lines if words[0] == "voluntary_ctxt_switches:"), 0)
