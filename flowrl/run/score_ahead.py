"""Score rollouts in a thread while the model samples the next ones: same scores, less waiting."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from rewards import Samples, Scores
from rewards.guard import SharedState, beside_sampling

R = TypeVar("R")


class ScoreAhead(Generic[R]):
    """Media and scores of an iteration's rollouts, in their order.

    `on_rollout` is called for every rollout but the last. It decodes at once, since decoding needs
    the model, and a thread scores. There is one thread, so a reward never runs twice at a time. A
    single rollout, or the last one, is scored on the main thread. Use with `contextlib.closing`.
    """

    def __init__(self, decode: Callable[[R], Samples], score: Callable[[Samples], Scores]) -> None:
        self.decode, self.score = decode, score
        self.decoded: list[Samples] = []
        self._early: list[Future[Scores]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._before = SharedState.now()

    def close(self) -> None:
        """Wait for the reward that runs, and drop those that wait."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def on_rollout(self, rollout: R) -> None:
        samples = self.decode(rollout)
        self.decoded.append(samples)
        self._early.append(self._submit(samples))

    def _submit(self, samples: Samples) -> Future[Scores]:
        self._pool = self._pool or ThreadPoolExecutor(
            1, thread_name_prefix="rewards", initializer=beside_sampling
        )
        return self._pool.submit(self.score, samples)

    def media(self, rollouts: Sequence[R]) -> list[Samples]:
        """Decode the rollouts that `on_rollout` has not seen; return the samples of all."""
        self.decoded += [self.decode(rollout) for rollout in rollouts[len(self.decoded) :]]
        return self.decoded

    def scores(self) -> list[Scores]:
        """Return scores of all media. An error of a reward in the thread is raised here."""
        early = [future.result() for future in self._early]
        if early:  # no sampling runs beside them any more
            self._before.check(early[0].names)
        return [*early, *(self.score(samples) for samples in self.decoded[len(early) :])]
