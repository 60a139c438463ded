"""The position of a window of noisy steps: a pure function of (iteration, seed).

The window of an iteration is the same on every process and machine, and after a resume. Windows
start at 0, stride, 2 stride, ... and end before `limit`; near the end they shrink, as in MixGRPO's
code. In that code the start also reaches `limit` itself, and the window stays empty there (from
iteration 575 on with 25 steps and the defaults). Here the last window with a step is kept, or the
start returns to 0 (`roll_back`) without that gap.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from samplers.number_ranges import AT_LEAST_0, AT_LEAST_1


@runtime_checkable
class WindowPosition(Protocol):
    def __call__(self, iteration: int, seed: int, limit: int, size: int) -> int:
        """The first step, below `limit`; the window is [start, min(start + size, limit))."""
        ...


def _check(iteration: int) -> None:
    if iteration < 0:
        raise ValueError(f"iterations are counted from 0, got {iteration}")


@dataclass(frozen=True)
class Progressive:
    """A window that moves by `stride` steps every `every` iterations: MixGRPO's default,
    arXiv:2507.21802.

    `stride=None` moves by the window's size: no overlap.

    every      iterations that the window stays, at least 1
    stride     steps by which it moves, at least 1; null is its size
    roll_back  whether it begins again at the first step after the last; else it stays there
    """

    every: int = 25
    stride: int | None = 1
    roll_back: bool = False

    def __post_init__(self) -> None:
        AT_LEAST_1.check("Progressive's every", self.every)
        AT_LEAST_1.check("Progressive's stride", self.stride)

    def __call__(self, iteration: int, seed: int, limit: int, size: int) -> int:
        _check(iteration)
        starts = range(0, limit, self.stride or size)
        moves = iteration // self.every
        return starts[moves % len(starts) if self.roll_back else min(moves, len(starts) - 1)]


@dataclass(frozen=True)
class Decaying:
    """A progressive window that speeds up: it stays `every` iterations at the start and `least` at
    the end.

    At start l of `limit` it stays max(least, int(every (1 - p) + least p)) iterations with p = l /
    limit. `least=None` is max(1, every // 4). Without `roll_back` it ends at the last window.

    every      iterations that the window stays at the start, at least 1
    least      iterations that it stays at the end, at least 1; null is a quarter of `every`
    stride     steps by which it moves, at least 1; null is its size
    roll_back  whether it begins again at the first step after the last; else it stays there
    """

    every: int = 25
    least: int | None = None
    stride: int | None = 1
    roll_back: bool = False

    def __post_init__(self) -> None:
        AT_LEAST_1.check("Decaying's every", self.every)
        AT_LEAST_1.check("Decaying's least", self.least)
        AT_LEAST_1.check("Decaying's stride", self.stride)

    def stay(self, start: int, limit: int) -> int:
        least = max(1, self.every // 4) if self.least is None else self.least
        progress = start / limit
        return max(least, int(self.every * (1 - progress) + least * progress))

    def __call__(self, iteration: int, seed: int, limit: int, size: int) -> int:
        _check(iteration)
        return _walk(self.stay, iteration, range(0, limit, self.stride or size), self.roll_back)


@dataclass(frozen=True)
class ExponentiallyDecaying:
    """A progressive window that stays for exp(-rate) of the time per step from step `after` on.

    At start l it stays ceil(every exp(-rate max(0, l - after))) iterations.

    every      iterations that the window stays at the start, at least 1
    rate       decay of that time per step, at least 0; 0 is none
    after      step from which the time decays, at least 0
    stride     steps by which it moves, at least 1; null is its size
    roll_back  whether it begins again at the first step after the last; else it stays there
    """

    every: int = 25
    rate: float = 0.1
    after: int = 13
    stride: int | None = 1
    roll_back: bool = False

    def __post_init__(self) -> None:
        AT_LEAST_1.check("ExponentiallyDecaying's every", self.every)
        AT_LEAST_0.check("ExponentiallyDecaying's rate", self.rate)
        AT_LEAST_0.check("ExponentiallyDecaying's after", self.after)
        AT_LEAST_1.check("ExponentiallyDecaying's stride", self.stride)

    def stay(self, start: int, limit: int) -> int:
        return math.ceil(self.every * math.exp(-self.rate * max(0, start - self.after)))

    def __call__(self, iteration: int, seed: int, limit: int, size: int) -> int:
        _check(iteration)
        return _walk(self.stay, iteration, range(0, limit, self.stride or size), self.roll_back)


@dataclass(frozen=True)
class Random:
    """A window placed at random in [low, high) in each iteration; `high=None` is the window's
    limit.

    Flow-GRPO-Fast uses low = 0 and high = steps / 2. Here all processes share the start (its code
    draws one per process, and MixGRPO's draws without a seed).

    low   first step at which the window may start, at least 0
    high  step before which it starts, at least 1; null is the last possible
    """

    low: int = 0
    high: int | None = None

    def __post_init__(self) -> None:
        AT_LEAST_0.check("Random's low", self.low)
        AT_LEAST_1.check("Random's high", self.high)

    def __call__(self, iteration: int, seed: int, limit: int, size: int) -> int:
        high = limit if self.high is None else self.high
        if not 0 <= self.low <= high - size or high > limit:
            raise ValueError(
                f"no window of {size} steps fits between {self.low} and {high} (the limit is "
                f"{limit})"
            )
        return random.Random(f"window/{seed}/{iteration}").randint(self.low, high - size)


@dataclass(frozen=True)
class Frozen:
    """A window that always starts at `start`: MixGRPO-Flash*.

    start  step at which the window starts, at least 0
    """

    start: int = 0

    def __post_init__(self) -> None:
        AT_LEAST_0.check("Frozen's start", self.start)

    def __call__(self, iteration: int, seed: int, limit: int, size: int) -> int:
        if not 0 <= self.start < limit:
            raise ValueError(
                f"a window cannot start at step {self.start}: the last possible start is "
                f"{limit - 1}"
            )
        return self.start


def _walk(stay: Callable[[int, int], int], iteration: int, starts: range, roll_back: bool) -> int:
    """The start at an iteration, where each start has its own duration."""
    stays = [stay(start, starts.stop) for start in starts]
    if roll_back:
        iteration %= sum(stays)
    for start, time in zip(starts, stays, strict=True):
        if iteration < time:
            return start
        iteration -= time
    return starts[-1]
