"""The processes of ours that stand around untrusted code and end it.

    keeper    outside of the code's namespaces, where no signal and no call of the code reaches it;
              the run's process holds the other end of its pipe
    process 1 of the code's own namespace of processes; when it ends, the kernel kills all others
              there, of any session, group, parent or user, before anybody can wait for it

Neither runs a line of the code, so nothing here needs the code's cooperation.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable

from cgroup import end_group

TYPE_CHECKING = False  # typing itself takes a tenth of a program's start
if TYPE_CHECKING:
    from typing import Any, NoReturn

WATCH_SECONDS = 0.02  # between two looks at the memory of all processes


def keep_program(child: int, ready: int, beside: int, settings: dict[str, Any]) -> NoReturn:
    """Wait for the child, and exit with its code once it and all below it are gone.

    The child is killed when the run's process says so or ends, when its time is over, or when
    together its processes exceed their memory, where shared pages count once per process. They can
    be counted if the child says `1` through `ready`: its /proc is then visible here. The folder of
    a run that was killed is removed here; `beside` is the one that holds it.
    """
    counted = os.read(ready, 1) == b"1"
    memory, until = settings["memory"], time.monotonic() + settings["most_seconds"]

    def late_or_large() -> bool:
        return time.monotonic() > until or (counted and held_bytes() > memory)

    ended = _wait(child, settings["lifeline"], late_or_large)
    if ended is None:
        os.kill(child, signal.SIGKILL)  # nobody has waited for it, so the number is still its own
        ended = os.waitpid(child, 0)[1]
    if settings["group"] is not None:
        end_group(settings["group"])
    if _closed(settings["lifeline"]):  # nobody else will
        import shutil

        name = os.path.basename(settings["folder"])
        shutil.rmtree(name, ignore_errors=True, dir_fd=beside)
    _leave(ended)


def _closed(pipe: int) -> bool:
    """Whether the other end of the run's process is gone, which else says when it wants an end."""
    return bool(select.select([pipe], [], [], 0)[0]) and not os.read(pipe, 1)


def reap(child: int, keeper: int) -> NoReturn:
    """Be process 1: wait for all that end here, and end with the child, or with the keeper, whose
    end closes the other end of its file. Signals of its own namespace that it does not handle do
    not reach it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ended = _wait(child, keeper, lambda: False)
    _leave(signal.SIGKILL if ended is None else ended)


def _wait(child: int, file: int, over: Callable[[], bool]) -> int | None:
    """The child's status when it ends; None as soon as `file` can be read or `over` is true."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        while (ended := _ended())[0]:
            if ended[0] == child:
                return ended[1]
        if over():
            return None
        ready = select.select([file, woken], [], [], WATCH_SECONDS)[0]
        if file in ready:
            return None
        if woken in ready:
            os.read(woken, 2**12)


def _ended() -> tuple[int, int]:
    """A child that has ended and its status; 0 for its number if none has."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def _leave(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def held_bytes(proc: str = "/proc") -> int:
    """Memory of all processes of the namespace but for process 1, which is ours: resident pages,
    and those that the kernel has moved to its swap."""
    return sum(
        _of_process(f"{proc}/{name}") for name in os.listdir(proc) if name.isdigit() and name != "1"
    )


def _of_process(folder: str) -> int:
    """Bytes of a process; 0 if it has ended. One whose first thread alone has ended shows no
    memory, but each of its other threads shows all of it."""
    try:
        status = _of_status(f"{folder}/status")
        if status:
            return status
        threads = os.listdir(f"{folder}/task")
    except OSError:
        return 0
    return max((_of_thread(f"{folder}/task/{name}") for name in threads), default=0)


def _of_thread(folder: str) -> int:
    try:
        return _of_status(f"{folder}/status")
    except OSError:
        return 0


def _of_status(path: str) -> int:
    with open(path) as file:
        return sum(
            int(line.split()[1]) * 1024 for line in file if line.startswith(("VmRSS:", "VmSwap:"))
        )
