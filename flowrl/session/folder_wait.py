"""Waiting for a run's folder in which another process trains."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from flowrl.errors import FolderInUse, WaitEnded
from flowrl.session.record import clock

LOOK_SECONDS = 5.0  # between two looks at the folder
FIRST_REMINDER, LAST_REMINDER = 60.0, 3600.0  # seconds between two lines: twice as long each time


@dataclass
class FolderWait:
    """One wait for a run's folder, which says at its beginning and from time to time for whom."""

    folder: Path
    began: float = field(default_factory=lambda: time.monotonic())
    said: float | None = None  # seconds until the last line
    pause: float = FIRST_REMINDER

    def on(self, error: FolderInUse) -> None:
        """Wait once more, and say so where it is time. WaitEnded where a signal ends the wait."""
        waited = time.monotonic() - self.began
        if self.said is None:
            print(
                f"waiting until {self.folder} is free: {error.reason} (Ctrl-C ends only the wait)",
                flush=True,
            )
            self.said = waited
        elif waited - self.said >= self.pause:
            print(f"still waiting, {clock(waited)} so far: {error.reason}", flush=True)
            self.said, self.pause = waited, min(2 * self.pause, LAST_REMINDER)
        try:
            time.sleep(LOOK_SECONDS)
        except KeyboardInterrupt as ended:
            raise WaitEnded(
                f"the wait for {self.folder} has ended; this command changed nothing there"
            ) from ended
