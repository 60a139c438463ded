"""Plans without noise that keep the states before one step, from which samples are rebuilt."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from samplers.noise import key_hash
from samplers.plan import Plan, steps_of

TRIES = 1000  # of a draw that has to fall inside the steps


@dataclass(frozen=True)
class LastSteps:
    """Euler steps that keep the states before the last `last` steps: DRaFT-K (arXiv:2309.17400).

    cut     fixed    `last` steps in every iteration
            normal   drawn from a normal distribution with mean `last` and standard deviation
                     `spread`, rounded up, at least one and not all: AlignProp (arXiv:2310.03739)
            uniform  any number from 1 to all steps
    All draws of an iteration share the number.
    """

    group: int
    last: int = 1
    cut: Literal["fixed", "normal", "uniform"] = "fixed"
    spread: float = 5.0

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        steps = len(sigmas) - 1
        if not 1 <= self.last <= steps:
            raise ValueError(
                f"last must be between 1 and {steps}, the number of steps, not {self.last}"
            )
        if self.spread < 0:
            raise ValueError(
                f"spread is a standard deviation and must be at least 0, not {self.spread}"
            )
        keep = self._first(steps, random.Random(key_hash(seed, iteration, "last steps")))
        return (Plan(steps_of(sigmas), roots=self.group, keep=keep),)

    def _first(self, steps: int, rng: random.Random) -> int:
        if self.cut == "uniform":
            return rng.randrange(steps)
        if self.cut == "fixed":
            return steps - self.last
        for _ in range(TRIES):
            if 1 <= (first := int(rng.gauss(steps - self.last, self.spread))) < steps:
                return first
        return steps - self.last


@dataclass(frozen=True)
class OneOfSteps:
    """Euler steps that keep the state before one step of [first, stop): ReFL (arXiv:2304.05977).

    `first` and `stop` are shares of the steps. One step is drawn per iteration, for all of its
    draws.
    """

    group: int
    first: float = 0.75
    stop: float = 1.0

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        steps = len(sigmas) - 1
        first, stop = (round(share * steps) for share in (self.first, self.stop))
        if not 0 <= first < stop <= steps:
            raise ValueError(
                f"first {self.first} and stop {self.stop} select no step: as shares of {steps} "
                f"steps they mean steps {first} up to, but not including, {stop} of 0 to "
                f"{steps - 1}"
            )
        rng = random.Random(key_hash(seed, iteration, "one step"))
        return (Plan(steps_of(sigmas), roots=self.group, keep=rng.randrange(first, stop)),)
