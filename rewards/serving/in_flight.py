"""The requests in flight of a client, over all threads: limited in number, counted, cancellable."""

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

EventLoop = asyncio.AbstractEventLoop


class InFlight:
    """Requests in flight. Each thread has its own event loop; shared state is here, under one
    lock.

    most  maximum number of requests at a time, over all threads; first come, first served
    """

    def __init__(self, most: int) -> None:
        self.lock = threading.Lock()
        self._free = most
        self._waiting: deque[tuple[EventLoop, asyncio.Future[None]]] = deque()
        self._running: set[tuple[EventLoop, asyncio.Task[None]]] = set()
        self._counts: dict[str, float] = defaultdict(float)

    def add(self, numbers: Mapping[str, int | float]) -> None:
        with self.lock:
            for name, number in numbers.items():
                self._counts[name] += number

    def counted(self) -> dict[str, float]:
        """Return the sums since the last call and reset them."""
        with self.lock:
            counts, self._counts = self._counts, defaultdict(float)
        return counts

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the `most` places; wait for a free one."""
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    async def _enter(self) -> None:
        with self.lock:
            if self._free:
                self._free -= 1
                return
            turn = (asyncio.get_running_loop(), asyncio.get_running_loop().create_future())
            self._waiting.append(turn)
        try:
            await turn[1]
        except asyncio.CancelledError:
            with self.lock:
                waits = turn in self._waiting
                if waits:
                    self._waiting.remove(turn)
            if not waits:  # the place had been passed on to this request
                self._leave()
            raise

    def _leave(self) -> None:
        with self.lock:
            if not self._waiting:
                self._free += 1
                return
            loop, turn = self._waiting.popleft()
            loop.call_soon_threadsafe(_let_in, turn)  # its coroutine waits, so its loop runs

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """Make the current task cancellable by `cancel`."""
        task = asyncio.current_task()
        assert task is not None
        mine = (asyncio.get_running_loop(), task)
        with self.lock:
            self._running.add(mine)
        try:
            yield
        finally:
            with self.lock:
                self._running.discard(mine)

    def cancel(self) -> None:
        """Cancel the tasks of all threads."""
        with self.lock:
            for loop, task in self._running:
                loop.call_soon_threadsafe(task.cancel)


def _let_in(turn: "asyncio.Future[None]") -> None:
    if not turn.done():
        turn.set_result(None)
