"""Score rollouts in threads while the model samples the next ones: same scores, less waiting."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from rewards import Reward, Samples, Scores
from rewards.checks.self_test import Made
from rewards.guard import SharedState, beside_sampling
from rewards.types import Cancels, Concurrent, Waits, parts_of

R = TypeVar("R")
Score = Callable[[Mapping[str, Reward], Samples], Scores]


def may_overlap(reward: Reward) -> bool:
    """Whether a reward, and every part of a composite one, may be called in several threads."""
    if not isinstance(reward, Concurrent) or not reward.concurrent:
        return False
    return not isinstance(reward, Made) or all(map(may_overlap, reward.parts.values()))


class ScoreAhead(Generic[R]):
    """Media and scores of an iteration's rollouts, in their order.

    `on_rollout` is called for every rollout but the last. It decodes at once, since decoding needs
    the model, and threads score. Each concurrent reward has a call of its own for each rollout, and
    at most `CALLS` of these run at once. All other rewards share one thread, so they never run
    twice at a time; they score a single rollout, or the last one, on the main thread. Of several
    errors that of the first rollout is raised. Use with `contextlib.closing`.
    """

    CALLS: ClassVar[int] = 16
    PATIENCE: ClassVar[float] = 0.1  # seconds until a call that began late is cancelled again

    def __init__(
        self, decode: Callable[[R], Samples], rewards: Mapping[str, Reward], score: Score
    ) -> None:
        self.decode, self.rewards, self.score = decode, rewards, score
        self.overlapping = [{name: each} for name, each in rewards.items() if may_overlap(each)]
        self.here = {name: each for name, each in rewards.items() if not may_overlap(each)}
        self.decoded: list[Samples] = []
        self._early: list[list[Future[Scores]]] = []
        self._begun: list[Future[Scores]] = []
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._before = SharedState.now()

    def close(self) -> None:
        """Drop the calls that wait, cancel those of servers, and wait for those that run here."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        while running := [call for call in self._begun if not call.done()]:
            for part in parts_of(self.overlapping, Cancels):
                part.cancel()
            wait(running, self.PATIENCE)
        for pool in self._pools.values():
            pool.shutdown()

    def on_rollout(self, rollout: R) -> None:
        samples = self.decode(rollout)
        self.decoded.append(samples)
        here = [self._submit(self.here, samples, 1)] if self.here else []
        self._early.append([*here, *self._concurrent(samples)])

    def _concurrent(self, samples: Samples) -> list[Future[Scores]]:
        return [self._submit(reward, samples, self.CALLS) for reward in self.overlapping]

    def _submit(
        self, rewards: Mapping[str, Reward], samples: Samples, threads: int
    ) -> Future[Scores]:
        if threads not in self._pools:
            self._pools[threads] = ThreadPoolExecutor(
                threads, thread_name_prefix="rewards", initializer=beside_sampling
            )
        self._begun.append(self._pools[threads].submit(self.score, rewards, samples))
        return self._begun[-1]

    def media(self, rollouts: Sequence[R]) -> list[Samples]:
        """Decode the rollouts that `on_rollout` has not seen; return the samples of all."""
        self.decoded += [self.decode(rollout) for rollout in rollouts[len(self.decoded) :]]
        return self.decoded

    def scores(self) -> list[Scores]:
        """Return scores of all media. An error of a reward in a thread is raised here."""
        late = self.decoded[len(self._early) :]
        if (
            not self._early and len(self.overlapping) + bool(self.here) <= 1
        ):  # nothing to wait beside
            return [self.score(self.rewards, samples) for samples in late]
        asked = [self._concurrent(samples) for samples in late]
        early = [self._joined([call.result() for call in calls]) for calls in self._early]
        if early:  # no sampling runs beside them any more
            self._before.check(early[0].names)
        found: list[Scores] = []
        for samples, calls in zip(late, asked, strict=True):
            here = [self.score(self.here, samples)] if self.here else []
            found.append(self._joined([*here, *(call.result() for call in calls)]))
        self._before.check(tuple(self.rewards))
        return [*early, *found]

    def _joined(self, columns: Sequence[Scores]) -> Scores:
        return joined_columns(columns, tuple(self.rewards))


def joined_columns(columns: Sequence[Scores], names: tuple[str, ...]) -> Scores:
    """Scores of the same samples by different rewards, in the order of `names`."""
    have = [name for each in columns for name in each.names]
    place = [have.index(name) for name in names]
    values, scored = (
        torch.cat(c, 1) for c in ([e.values for e in columns], [e.scored for e in columns])
    )
    return Scores(values[:, place], scored[:, place], names)


def asks_server(reward: Reward) -> bool:
    """Whether a reward, or every part of a composite one, waits for a server."""
    if isinstance(reward, Made):
        return bool(reward.parts) and all(asks_server(part) for part in reward.parts.values())
    return isinstance(reward, Waits) and reward.waits


class ScoreParts(Generic[R]):
    """Media and scores of an iteration's rollouts: `ScoreAhead`, and parts of a single plan.

    A part is decoded as soon as it is drawn. The rewards that wait for a server are asked at once
    for its samples; they have all samples of the part's draws. The other rewards score all samples
    together, so that no batch of theirs is composed otherwise. Use with
    `contextlib.closing`.
    """

    def __init__(
        self, decode: Callable[[R], Samples], rewards: Mapping[str, Reward], score: Score
    ) -> None:
        self.rewards, self.score = rewards, score
        self.asked = {name: reward for name, reward in rewards.items() if asks_server(reward)}
        self.whole = ScoreAhead(decode, rewards, score)
        self.parts = ScoreAhead(decode, self.asked, score)

    def close(self) -> None:
        try:
            self.parts.close()
        finally:
            self.whole.close()

    @property
    def on_part(self) -> Callable[[R], None] | None:
        """None if no reward waits: then parts gain nothing."""
        return self.parts.on_rollout if self.asked else None

    def media(self, rollouts: Sequence[R]) -> list[Samples]:
        """Decode what is not decoded; return the samples of all rollouts."""
        if not self.parts.decoded:
            return self.whole.media(rollouts)
        assert len(rollouts) == 1, "parts are of a single plan"
        return [joined_samples(self.parts.decoded)]

    def scores(self, samples: Sequence[Samples]) -> list[Scores]:
        """Return scores of the samples. An error of a reward in the thread is raised here."""
        if not self.parts.decoded:
            return self.whole.scores()
        here = {name: each for name, each in self.rewards.items() if name not in self.asked}
        found = [self.score(here, samples[0])] if here else []
        return [joined_columns([Scores.joined(self.parts.scores()), *found], tuple(self.rewards))]


def joined_samples(parts: Sequence[Samples]) -> Samples:
    """All samples of parts, in order."""
    first = parts[0].media
    if isinstance(first, Tensor):
        media = torch.cat([each for part in parts if isinstance(each := part.media, Tensor)])
    else:
        media = [item for part in parts for item in part.media]
    prompts = [text for part in parts for text in part.prompts]
    meta = [row for part in parts for row in part.meta]
    return Samples(media, prompts, torch.cat([part.group for part in parts]), meta)
