"""Rewards score what is there while the model draws more: the same scores, and less waiting."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal

from rewards import Samples, Scores
from rewards.guard import SharedState, beside_sampling


class ScoreAhead:
    """Media and scores of an iteration's rollouts, in their order.

    `on_rollout` is told of a rollout that others follow: it is decoded at once, since that is the
    model's work, and scored by a thread. One thread, so a reward is never asked twice at a time;
    a single rollout, or the last one, is scored where it always was.
    """

    def __init__(
        self, decode: Callable[[Any], Samples], score: Callable[[Samples], Scores]
    ) -> None:
        self.decode, self.score = decode, score
        self.shown: list[Samples] = []
        self._found: list[Future[Scores]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._before = SharedState.now()

    def __enter__(self) -> "ScoreAhead":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        return False

    def on_rollout(self, rollout: Any) -> None:
        samples = self.decode(rollout)
        self.shown.append(samples)
        self._found.append(self._submit(samples))

    def _submit(self, samples: Samples) -> Future[Scores]:
        self._pool = self._pool or ThreadPoolExecutor(
            1, thread_name_prefix="rewards", initializer=beside_sampling
        )
        return self._pool.submit(self.score, samples)

    def media(self, rollouts: Sequence[Any]) -> list[Samples]:
        """Of all of them; those that were not heard of are decoded now."""
        self.shown += [self.decode(rollout) for rollout in rollouts[len(self.shown) :]]
        return self.shown

    def scores(self) -> list[Scores]:
        """Of the media; what a reward raised in the thread is raised here."""
        early = [found.result() for found in self._found]
        if early:  # no sampling runs beside them any more
            self._before.check(early[0].names)
        return [*early, *(self.score(samples) for samples in self.shown[len(early) :])]
