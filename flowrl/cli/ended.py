"""SIGTERM and a closed terminal end a command as Ctrl-C does, so that it removes what it began."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from flowrl.cli.restarts import LAUNCHER_VARIABLES
from flowrl.session.output import ending_signals


class EndedBySignal(KeyboardInterrupt):
    """A signal that ends a command; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Raise EndedBySignal in the body when a signal asks the process to end. The same signal once
    more ends it at once, and so does the first in a process that was forked meanwhile.

    Handlers of a program that calls flowrl stay, and so does a SIGHUP that is ignored (nohup). A
    launcher's processes keep the signals' default: while one waits for another process in torch's
    own code, no handler of Python's runs, and its launcher waits for its end.
    """
    alone = not any(name in os.environ for name in LAUNCHER_VARIABLES)
    if not alone or threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, before = os.getpid(), dict[int, object]()

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != owner:
            os.kill(os.getpid(), number)
        raise EndedBySignal(number)

    for number in ending_signals():
        if signal.getsignal(number) is signal.SIG_DFL:  # Python's own of Ctrl-C is none
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_DFL)
