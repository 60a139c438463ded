"""Score rollouts in threads while the model samples the next ones: same scores, less waiting."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import torch

from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.sample import (
    SampledUnit,
    UnitSampler,
    UnitStages,
    made_unit,
)
from flowrl.iteration.score import early_scores, joined_columns
from flowrl.iteration.units import EARLY, SamplingUnit, UnitScores, joined_samples
from flowrl.session.session import Session, score_once
from flowrl.session.waiting import asks_server, may_overlap
from rewards import Reward, Samples, Scores
from rewards.guard import SharedState, beside_sampling
from rewards.types import Cancels, parts_of

R = TypeVar("R")
P = ParamSpec("P")
T = TypeVar("T")
ScoreCall = Callable[[Mapping[str, Reward], Samples], Scores]


def queued(do: Callable[P, T], device: str) -> Callable[P, T]:
    """Wrap `do` for another thread. On a GPU it runs in a separate stream, which waits for all work
    that this thread has queued (the decoding of the samples) while the next samples are drawn."""
    if device != "cuda":
        return do
    index, decoded = torch.cuda.current_device(), torch.cuda.Event()
    decoded.record()

    def done(*args: P.args, **named: P.kwargs) -> T:
        stream = torch.cuda.Stream(index)  # a thread's current device may be another one
        stream.wait_event(decoded)
        with torch.cuda.stream(stream):
            return do(*args, **named)

    return done


class ScoreAhead(Generic[R]):
    """Media and scores of an iteration's rollouts, in order, computed while sampling continues.

    `on_rollout` is called for every rollout except the last. It decodes at once, since decoding
    needs the model, and threads score. Each concurrent reward has its own call for each rollout,
    and at most `CALLS` of these run at once. All other rewards share one thread, so they never run
    concurrently; they score a single rollout, or the last one, on the main thread. If there are
    several errors, the first rollout's is raised. Use with `contextlib.closing`.
    """

    CALLS: ClassVar[int] = 16
    PATIENCE: ClassVar[float] = 0.1  # seconds until a call that began late is cancelled again

    def __init__(
        self,
        decode: Callable[[R], Samples],
        rewards: Mapping[str, Reward],
        score: ScoreCall,
        device: str = "cpu",
    ) -> None:
        self.decode, self.rewards, self.score, self.device = decode, rewards, score, device
        self.overlapping = [
            {name: reward} for name, reward in rewards.items() if may_overlap(reward)
        ]
        self.in_turn = {name: reward for name, reward in rewards.items() if not may_overlap(reward)}
        self.decoded: list[Samples] = []
        self._early: list[list[Future[Scores]]] = []
        self._begun: list[Future[Any]] = []
        self._leaving: list[Future[None]] = []
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._before = SharedState.now()

    def close(self) -> None:
        """Drop waiting calls, cancel calls to servers, and wait for calls that run here."""
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
        in_turn = [self._submit(self.in_turn, samples, 1)] if self.in_turn else []
        self._early.append([*in_turn, *self._concurrent(samples)])

    def leave_device(self) -> None:
        """Move the last media to the CPU in a thread, as soon as they are scored."""
        index, calls = len(self.decoded) - 1, self._early[-1]

        def move() -> None:
            for call in calls:
                with suppress(CancelledError):
                    call.exception()  # waits for its end
            self.decoded[index] = self.decoded[index].on_cpu()

        pool = self._pool(1)  # whose calls end in this order
        self._leaving.append(pool.submit(queued(move, self.device)))
        self._begun.append(self._leaving[-1])

    def left_device(self) -> list[Samples]:
        """All media, once `leave_device` has moved them."""
        for leaving in self._leaving:
            leaving.result()
        return self.decoded

    def _concurrent(self, samples: Samples) -> list[Future[Scores]]:
        return [self._submit(reward, samples, self.CALLS) for reward in self.overlapping]

    def _submit(
        self, rewards: Mapping[str, Reward], samples: Samples, threads: int
    ) -> Future[Scores]:
        score = queued(self.score, self.device)
        call = self._pool(threads).submit(score, rewards, samples)
        self._begun.append(call)
        return call

    def _pool(self, threads: int) -> ThreadPoolExecutor:
        if threads not in self._pools:
            self._pools[threads] = ThreadPoolExecutor(
                threads, thread_name_prefix="rewards", initializer=beside_sampling
            )
        return self._pools[threads]

    def media(self, rollouts: Sequence[R]) -> list[Samples]:
        """Decode rollouts that `on_rollout` has not received; returns the samples of all
        rollouts."""
        self.decoded += [self.decode(rollout) for rollout in rollouts[len(self.decoded) :]]
        return self.decoded

    def scores(self) -> list[Scores]:
        """Scores of all media. Raises errors of rewards that occurred in a thread."""
        late = self.decoded[len(self._early) :]
        if (
            not self._early and len(self.overlapping) + bool(self.in_turn) <= 1
        ):  # nothing to wait beside
            return [self.score(self.rewards, samples) for samples in late]
        late_calls = [self._concurrent(samples) for samples in late]
        early = [self._joined([call.result() for call in calls]) for calls in self._early]
        if early:  # no sampling runs beside them any more
            self._before.check(early[0].names)
        scores: list[Scores] = []
        for samples, calls in zip(late, late_calls, strict=True):
            in_turn = [self.score(self.in_turn, samples)] if self.in_turn else []
            scores.append(self._joined([*in_turn, *(call.result() for call in calls)]))
        self._before.check(tuple(self.rewards))
        return [*early, *scores]

    def _joined(self, columns: Sequence[Scores]) -> Scores:
        return joined_columns(columns, tuple(self.rewards))


class ScoreSlices(Generic[R]):
    """Media and scores of an iteration's rollouts: `ScoreAhead`, or slices of one plan's draws.

    A slice is decoded as soon as it is sampled, and has all samples of its draws. Rewards that wait
    for a server score a slice at once; on a CUDA device so do all others. On a CPU the others would
    share its cores with the model, so they score all samples together at the end. Scored slices
    leave a CUDA device at once, during sampling. Use with `contextlib.closing`.
    """

    def __init__(
        self,
        decode: Callable[[R], Samples],
        rewards: Mapping[str, Reward],
        score: ScoreCall,
        device: str = "cpu",
    ) -> None:
        self.rewards, self.score, gpu = rewards, score, device == "cuda"
        self.asked = {n: reward for n, reward in rewards.items() if gpu or asks_server(reward)}
        self._gpu = gpu
        self.whole = ScoreAhead(decode, rewards, score, device)
        self.slices = ScoreAhead(decode, self.asked, score, device)

    def close(self) -> None:
        try:
            self.slices.close()
        finally:
            self.whole.close()

    def hooks(self, slices: bool) -> tuple[Callable[[R], None], Callable[[R], None] | None]:
        """Callbacks for each rollout, and for each slice of a single one. The second is None
        without `slices`, or if no reward scores slices."""
        return self.whole.on_rollout, self._on_slice if self.asked and slices else None

    def _on_slice(self, rollout: R) -> None:
        self.slices.on_rollout(rollout)
        if self._gpu:
            self.slices.leave_device()

    def media(self, rollouts: Sequence[R]) -> list[Samples]:
        """Decode the remaining rollouts; returns the samples of all rollouts. An empty list if
        slices leave the device, where no reward scores them together: see `on_cpu`."""
        if not self.slices.decoded:
            return self.whole.media(rollouts)
        assert len(rollouts) == 1, "slices belong to a single plan"
        return [] if self._gpu else [joined_samples(self.slices.decoded)]

    def on_cpu(self, samples: Sequence[Samples]) -> list[Samples]:
        """The samples that `media` returned, with their media in host memory."""
        if self._gpu and self.slices.decoded:
            return [joined_samples(self.slices.left_device())]
        return [part.on_cpu() for part in samples]

    def scores(self, samples: Sequence[Samples]) -> list[Scores]:
        """Scores of the samples. Raises an error of a reward that occurred in the thread."""
        if not self.slices.decoded:
            return self.whole.scores()
        plain_rewards = {
            name: reward for name, reward in self.rewards.items() if name not in self.asked
        }
        plain_scores = [self.score(plain_rewards, samples[0])] if plain_rewards else []
        return [
            joined_columns(
                [Scores.joined(self.slices.scores()), *plain_scores], tuple(self.rewards)
            )
        ]


@dataclass(frozen=True)
class OverlappedSampler:
    """Samples a unit while threads score what is done."""

    session: Session
    clock: PhaseClock
    inner: UnitSampler

    def __call__(self, unit: SamplingUnit) -> SampledUnit:
        session, inner, parallel = self.session, self.inner, self.session.parallel
        score = partial(score_once, parallel)
        opened = inner.open(unit)
        with closing(ScoreSlices(opened.decode, session.rewards, score, parallel.device)) as ahead:
            on_rollout, on_slice = ahead.hooks(parallel.members == 1)
            sampling = replace(inner.sampling, on_rollout=on_rollout, on_slice=on_slice)
            rolled = inner.roll(opened, sampling)
            with self.clock("decode"):
                decoded = ahead.media(rolled.rollouts)
            with self.clock("score"):
                scores, samples = ahead.scores(decoded), ahead.on_cpu(decoded)
        sampled = made_unit(opened, rolled, samples)
        early = UnitScores(tuple(scores), tuple(samples))
        table = sampled.unit.table.with_value(EARLY, early)
        return sampled._replace(unit=replace(sampled.unit, table=table))


def wrap_unit(stages: UnitStages, session: Session, clock: PhaseClock) -> UnitStages:
    del clock
    sampler = stages.sample
    assert isinstance(sampler, UnitSampler), "it comes after features that change how plans roll"
    return UnitStages(OverlappedSampler(session, sampler.clock, sampler), early_scores)
