"""Ctrl-C and SIGTERM wait for the end of the iteration, so that a resumed run has the same bits."""

import signal
from types import FrameType

from accelerate import Accelerator
from accelerate.utils import gather_object


class Interrupt:
    """`with Interrupt() as i:` remembers the first signal; a second one stops at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        print("\nfinishing this iteration, then saving; once more to stop at once", flush=True)

    def asked(self, accelerator: Accelerator) -> int | None:
        """The signal that any process got: they all must leave the loop together."""
        del accelerator  # gathering uses the state that it set up
        return max((s for s in gather_object([self.signal]) if s is not None), default=None)
