"""Wall-clock seconds of an iteration by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class PhaseClock:
    """Adds up the seconds of each phase until `taken` is read."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

    def taken(self) -> dict[str, float]:
        """The metrics `seconds/<phase>`; the next iteration begins with none."""
        seconds, self.seconds = self.seconds, {}
        return {f"seconds/{phase}": duration for phase, duration in seconds.items()}
