"""Ctrl-C, SIGTERM and a closed terminal stop a run after its iteration, so that a resumed run has
the same bits."""

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType

from accelerate import Accelerator
from accelerate.utils import gather_object

from flowrl.session.output import ending_signals, reader_gone

LAUNCHED = "TORCHELASTIC_RUN_ID"  # in the environment of processes that torch's launcher started
AGAIN = 3.0  # seconds


class Interrupt:
    """Remembers the first signal inside `with Interrupt() as i:`; a second signal stops the program
    at once, except SIGHUP, of which a closed ssh may send several. SIGHUP that was ignored at the
    start (nohup) stays so.

    A launcher may forward a signal that its processes have already received from the terminal or
    the cluster: this does not count as a second signal. Python sets handlers only in the main
    thread, so a run in another thread has none, and the caller's handlers stay.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._at = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in ending_signals():
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            if number == signal.SIGHUP:
                return
            if LAUNCHED in os.environ and time.monotonic() - self._at < AGAIN:
                return
            raise KeyboardInterrupt
        self.signal, self._at = number, time.monotonic()
        with suppress(OSError):  # not print: the signal may have come in the middle of one
            os.write(1, b"\nfinishing this iteration, then saving; once more to stop at once\n")

    def pending(self, accelerator: Accelerator) -> int | None:
        """The signal that any process received, if any, since all must leave the loop together.
        SIGPIPE if nobody reads the output of one any more."""
        del accelerator  # gathering uses the state that it set up
        if self.signal is None and reader_gone():
            self.signal = signal.SIGPIPE
        return max((s for s in gather_object([self.signal]) if s is not None), default=None)
