"""Write a run's files in a thread while the run continues."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch import Tensor

WAITING = 1  # writes that wait for the one under way: more would hold more copies


class FileWriter:
    """Writes files in the order of the calls, one at a time.

    A write must hold all of its data, as copies, since the run changes the originals. Outside
    `beside` it is done at once. A failure is stored, and raised by the next `check` or `wait`.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._writes: deque[Future[object]] = deque()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Write in a thread inside the body. At its end all writes are completed; after Ctrl-C or
        an exit, only the current one."""
        with ThreadPoolExecutor(1, thread_name_prefix="files") as pool:
            self._pool, hurried = pool, True
            try:
                yield
                hurried = False
            except Exception:
                hurried = False
                raise
            finally:
                pool.shutdown(cancel_futures=hurried)
                self._pool = None
                self._writes.clear()

    def write(self, do: Callable[[], object]) -> None:
        """Queue a write. Waits while another write has not started yet."""
        if self._pool is None:
            do()
            return
        begun = [write for write in self._writes if not write.done()]
        for write in begun[: len(begun) - WAITING]:
            write.exception()  # waits; `check` raises it
        self._writes.append(self._pool.submit(do))

    def check(self) -> None:
        """Raise the failure of a finished write."""
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()

    def wait(self) -> None:
        """Wait for all writes. Raises the first failure."""
        while self._writes:
            self._writes.popleft().result()


def copied(value: Any) -> Any:
    """Copy a state of plain values and tensors, with tensors moved to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return value
