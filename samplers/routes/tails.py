"""Plans without noise that keep the states before one step, from which samples are rebuilt."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from samplers.noise import key_hash
from samplers.number_ranges import ANY_NUMBER, AT_LEAST_0
from samplers.plan import Plan, steps_of
from samplers.routes.keeping import KeepingRoute

TRIES = 1000  # of a draw that has to fall inside the steps


@dataclass(frozen=True)
class LastSteps:
    """Euler steps that keep the states before the last `last` steps: DRaFT-K (arXiv:2309.17400).

    cut     fixed    `last` steps in every iteration
            normal   drawn from a normal distribution with mean `last` and standard deviation
                     `spread`, rounded up, at least one and not all: AlignProp (arXiv:2310.03739)
            uniform  any number from 1 to all steps
    All draws of an iteration share the number.

    last    steps with gradients at the end, at least 1; more reach earlier steps, and cost memory
    spread  standard deviation of the number of steps with `cut: normal`, in steps, at least 0
    """

    group: int
    last: int = 1
    cut: Literal["fixed", "normal", "uniform"] = "fixed"
    spread: float = 5.0

    def __post_init__(self) -> None:
        AT_LEAST_0.check("LastSteps's spread is a standard deviation and", self.spread)

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        steps = len(sigmas) - 1
        if not 1 <= self.last <= steps:
            raise ValueError(
                f"last must be between 1 and {steps}, the number of steps, not {self.last}"
            )
        keep = self._first(steps, random.Random(key_hash(seed, iteration, "last steps")))
        return (Plan(steps_of(sigmas), roots=self.group, route=KeepingRoute((keep,))),)

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

    first  share of the steps before which no step is drawn, any number; meant for [0, 1)
    stop   share of the steps from which no step is drawn, any number; meant for (0, 1]
    """

    group: int
    first: float = 0.75
    stop: float = 1.0

    def __post_init__(self) -> None:
        ANY_NUMBER.check("OneOfSteps's first", self.first)
        ANY_NUMBER.check("OneOfSteps's stop", self.stop)

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
        route = KeepingRoute((rng.randrange(first, stop),))
        return (Plan(steps_of(sigmas), roots=self.group, route=route),)


def evenly_spaced(start: int, end: int, most: int) -> list[int]:
    """At most so many steps of [start, end), evenly spaced; `start` is the first."""
    count = end - start
    if count <= most:
        return list(range(start, end))
    return [start + round(i * (count - 1) / max(most - 1, 1)) for i in range(most)]


@dataclass(frozen=True)
class TwoLeaps:
    """Euler steps that keep the states of two leaps, from step k to step j and from j to the end:
    LeapAlign (arXiv:2604.15311), FlowBP-Lagrange (arXiv:2606.11075).

    order   velocities of each leap, at least 1, at evenly spaced steps
    spread  concentrations of the shares of the steps after j, between k and j, and before k, which
            are Dirichlet distributed; None: k and j are any two steps
    reach   the most steps from j to the end, at least 1; None: no bound
    k and j are drawn once per iteration, for all of its draws.
    """

    group: int
    order: int = 1
    spread: tuple[float, float, float] | None = None
    reach: int | None = None

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        steps = len(sigmas) - 1
        least = 2 if self.spread is None else 3
        if steps < least or self.order < 1 or (self.reach is not None and self.reach < least - 1):
            raise ValueError(
                f"two leaps need at least {least} steps, an order of at least 1 and a reach of at "
                f"least {least - 1}, not {steps} steps, {self.order} and {self.reach}"
            )
        rng = random.Random(key_hash(seed, iteration, "two leaps"))
        k, j = self._ends(steps, rng)
        keep: set[int] = set()
        for start, end in ((k, j), (j, steps)):
            nodes = evenly_spaced(start, end, self.order)
            later = {step + 1 for step in nodes[2:]} - {steps}  # whose velocity is a difference
            keep |= {*nodes, *later}
        route = KeepingRoute(tuple(sorted(keep)), j)
        return (Plan(steps_of(sigmas), roots=self.group, route=route),)

    def _ends(self, steps: int, rng: random.Random) -> tuple[int, int]:
        if self.spread is None and self.reach is None:
            k, j = sorted(rng.sample(range(steps), 2))
            return k, j
        reach = steps if self.reach is None else self.reach
        if self.spread is None:
            j = rng.randrange(max(1, steps - reach), steps)
            return rng.randrange(j), j
        shares = [rng.gammavariate(shape, 1.0) for shape in self.spread]
        lengths = [round(share / sum(shares) * steps) for share in shares]
        lengths[shares.index(max(shares))] += steps - sum(lengths)
        lengths = [max(1, length) for length in lengths]
        lengths[lengths.index(max(lengths))] += steps - sum(lengths)
        after = min(lengths[0], reach - 1)  # what is cut off here lies before k: j - k stays
        return steps - after - lengths[1] - 1, steps - after - 1


@dataclass(frozen=True)
class SomeSteps:
    """Euler steps that keep the states before `active` of them: FlowBP (arXiv:2606.11075).

    late   any number, how much likelier later steps are: step i of a part has the weight (i +
           1)^late; below 0 earlier steps are likelier
    split  draw them from two parts of the steps, in proportion to their lengths, the later of which
           begins with a drawn step that is always kept: the bridge of FlowBP-Bridge
    The steps are drawn once per iteration, for all of its draws.

    active  steps with gradients, at least 1; more cost memory
    """

    group: int
    active: int = 4
    late: float = 1.0
    split: bool = False

    def __post_init__(self) -> None:
        ANY_NUMBER.check("SomeSteps's late", self.late)

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        steps = len(sigmas) - 1
        if not 1 + self.split <= self.active <= steps:
            raise ValueError(
                f"active must be between {1 + self.split} and {steps}, the number of steps, not "
                f"{self.active}"
            )
        rng, bridge = random.Random(key_hash(seed, iteration, "some steps")), None
        if not self.split:
            keep = self._drawn(0, steps, self.active, rng)
        else:
            bridge = max(rng.sample(range(steps), 2))
            before = min(max(round(self.active * bridge / steps), 1), bridge, self.active - 1)
            before = max(before, self.active - (steps - bridge))
            keep = [*self._drawn(0, bridge, before, rng), bridge]
            keep += self._drawn(bridge + 1, steps, self.active - before - 1, rng)
        route = KeepingRoute(tuple(keep), bridge)
        return (Plan(steps_of(sigmas), roots=self.group, route=route),)

    def _drawn(self, start: int, end: int, count: int, rng: random.Random) -> list[int]:
        left, chosen = list(range(start, end)), list[int]()
        for _ in range(count):
            weights = [(step - start + 1) ** self.late for step in left]
            chosen.append(left.pop(rng.choices(range(len(left)), weights)[0]))
        return sorted(chosen)
