"""The thread that passes a run's records on to trackers.

`metrics.jsonl` is the record, and trackers mirror it: a tracker that raises, hangs, or is slower
than the run loses only its own copy. All trackers are called in this one thread, from start to end,
since some (MLflow) bind a run to a thread.
"""

import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
MOST_WAITING = 256  # records; a tracker that is slower than the run loses later ones
DEADLINE = 60.0  # seconds for the records that wait when a run ends
HURRIED = 5.0  # after a second Ctrl-C
Call = tuple[str, Callable[[], object]]  # the tracker's name, and what calls it


class Mirror:
    """Calls trackers in a thread, in the order of their records."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self.passed, self.lost = Counter[str](), Counter[str]()  # records by tracker
        self._calls: queue.Queue[Call | None] = queue.Queue(MOST_WAITING)
        self._thread = Thread(target=self._work, name="trackers", daemon=True)
        self._thread.start()

    def start(self, do: Callable[[], T]) -> T:
        """Call `do` in the thread and wait for it. Raises its error."""
        future = Future[T]()

        def call() -> None:
            try:
                future.set_result(do())
            except (Exception, SystemExit) as error:  # a service's own code
                future.set_exception(error)

        self._calls.put(("", call))
        return future.result()

    def pass_on(self, name: str, do: Callable[[], object]) -> None:
        """Queue a call to a tracker. The record is lost if the queue is full."""
        self.passed[name] += 1
        try:
            self._calls.put_nowait((name, do))
        except queue.Full:
            self._lose(name, f"it is slower than the run: {MOST_WAITING} records are waiting")

    def end(self, calls: Sequence[Call], seconds: float) -> None:
        """Make the remaining calls, within this many seconds in total, and report losses."""
        until = time.monotonic() + seconds
        try:
            for call in (*calls, None):
                self._calls.put(call, timeout=max(0.0, until - time.monotonic()))
        except queue.Full:
            pass  # the thread hangs: it is left behind
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            names = ", ".join(dict.fromkeys(name for name, _ in calls))
            self.warn(
                f"trackers: {names} did not finish within {seconds:g} s; metrics.jsonl has the "
                "missing records"
            )
        for name, lost in self.lost.items():
            self.warn(
                f"tracker {name}: {lost} of {self.passed[name]} records are missing; "
                "metrics.jsonl has all of them"
            )

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            name, do = call
            try:
                do()
            except (Exception, SystemExit) as error:  # a service's own code
                self._lose(name, f"{type(error).__name__}: {one_line(error)}")

    def _lose(self, name: str, reason: str) -> None:
        self.lost[name] += 1
        if self.lost[name] == 1:
            self.warn(
                f"tracker {name}: a record was lost ({reason}); the run continues, and "
                "metrics.jsonl has all of them"
            )


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@dataclass(frozen=True)
class MirroredTracker:
    """A tracker of accelerate that is called through the mirror."""

    inner: Any
    mirror: Mirror

    @property
    def name(self) -> str:
        return self.inner.name

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        copied = dict(values)
        self.pass_on(lambda tracker: tracker.log(copied, step=step, **more))

    def pass_on(self, do: Callable[[Any], object]) -> None:
        """Queue a call of `do` with the tracker."""
        self.mirror.pass_on(self.name, lambda: do(self.inner))
