"""Completions that a server samples while the model is updated: the answers of later iterations.

A server has one version of the weights. An iteration that is `workers.lag` ahead is asked for when
its version is loaded, and other weights are loaded once all answers have come. Answers are kept by
their request, which the iteration makes when it samples. One that is not found is sent then, with
the weights of its version, and has the same tokens.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from flowrl.models.language.served_adapters import InStep
from samplers.generate import Sampler, TokenRequest, WrittenTokens


@dataclass
class AnswersAhead:
    """Answers by request, and the thread that asks."""

    known: dict[bytes, WrittenTokens] = field(default_factory=dict)
    running: list[Future[object]] = field(default_factory=list)
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def begin(self, ask: Callable[[], object]) -> None:
        self.running.append(self.thread.submit(ask))

    def wait(self) -> None:
        """Wait for all requests. One that has failed is sent again when its answer is needed, where
        its error is raised."""
        for future in self.running:
            future.exception()
        self.running.clear()

    def take(self, asked: TokenRequest) -> WrittenTokens | None:
        """The answer to a request, if it was asked for."""
        if not (self.running or self.known):
            return None
        key = key_of(asked)
        if key not in self.known:
            self.wait()
        return self.known.pop(key, None)


@dataclass(frozen=True)
class Recording:
    """A sampler whose answers are kept."""

    sampler: Sampler
    known: dict[bytes, WrittenTokens]

    @property
    def exact(self) -> bool:
        return self.sampler.exact

    @property
    def elsewhere(self) -> bool:
        return self.sampler.elsewhere

    def __call__(self, asked: TokenRequest) -> WrittenTokens:
        answer = self.known[key_of(asked)] = self.sampler(asked)
        return answer


@dataclass(frozen=True)
class Loaded:
    """The weights that a server has now, whatever the model's become: an `InStep`."""

    name: str
    kept: InStep

    def current(self) -> str:
        return self.name

    def lost(self) -> bool:
        return False  # these weights may be gone here: the model's are loaded when it asks again

    def held(self) -> bool:
        return self.kept.held()

    def close(self) -> bool:
        """The server's weights are those of `kept`, which leaves it."""
        return True


def key_of(asked: TokenRequest) -> bytes:
    """A digest of what a request's tokens depend on besides the weights."""
    inputs = (
        [list(context) for context in asked.contexts],
        asked.noise.tolist(),
        asked.first,
        asked.room.tolist(),
        asked.temperature,
        asked.top_p,
        asked.top_k,
        asked.min_p,
    )
    return hashlib.sha256(repr(inputs).encode()).digest()
