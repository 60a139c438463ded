"""Steps of a tree that are noisy besides its splits, and steps that are not trained on."""

from dataclasses import dataclass

from samplers.number_ranges import AT_LEAST_0, AT_LEAST_1
from samplers.windows import Progressive, WindowPosition


@dataclass(frozen=True)
class Stripes:
    """Steps k with k % every < size: BranchGRPO's mixed mode (its code uses size 4, every 30).

    size   noisy steps at the start of a stripe, at least 0
    every  steps from one stripe to the next, at least 1
    """

    size: int = 4
    every: int = 30

    def __post_init__(self) -> None:
        AT_LEAST_0.check("Stripes's size", self.size)
        AT_LEAST_1.check("Stripes's every", self.every)

    def steps(self, last: int, iteration: int, seed: int) -> set[int]:
        return {k for k in range(last) if k % self.every < self.size}


@dataclass(frozen=True)
class Moving:
    """Steps in a window of `size` that moves with the iteration: the paper's mixed mode.

    size      noisy steps in a row, at least 1
    position  where they stand in an iteration: a part, such as `progressive`
    """

    size: int = 4
    position: WindowPosition = Progressive(30)

    def __post_init__(self) -> None:
        AT_LEAST_1.check("Moving's size", self.size)

    def steps(self, last: int, iteration: int, seed: int) -> set[int]:
        start = self.position(iteration, seed, last, self.size)
        return set(range(start, min(start + self.size, last)))


@dataclass(frozen=True)
class Prune:
    """Excludes steps of a tree from training, by depth: BranchGRPO, arXiv:2509.06040.

    `steps` are excluded. They move by `move` every `every` iterations (0: never) until they reach
    the step `stop`; from iteration `until` on nothing is pruned. A `move` below 0
    goes to earlier steps. The paper's window of 4 starts at the last split and moves deeper
    (move = 1); its code's moves to earlier steps (move = -1).

    steps  steps that are not trained at first, from 0
    every  iterations between moves, at least 0; 0: they stay
    move   steps by which they move, a whole number; below 0 to earlier steps
    stop   step at which they stop, at least 0; null: the last that they can reach
    until  iteration from which nothing is pruned, at least 0; null: always pruned
    """

    steps: tuple[int, ...]
    every: int = 0
    move: int = 1
    stop: int | None = None
    until: int | None = None

    def __post_init__(self) -> None:
        AT_LEAST_0.check("Prune's every", self.every)
        AT_LEAST_0.check("Prune's stop", self.stop)
        AT_LEAST_0.check("Prune's until", self.until)

    def at(self, iteration: int, last: int) -> set[int]:
        if not self.steps:
            raise ValueError(
                f"pruning leaves no step: the splits come too late for {last + 1} steps"
            )
        if not all(0 <= k < last for k in self.steps):
            raise ValueError(
                f"pruned steps {self.steps} are out of range, the steps are 0 to {last - 1}"
            )
        if self.until is not None and iteration >= self.until:
            return set()
        moves = iteration // self.every if self.every else 0
        if self.move > 0:
            stop = last - 1 if self.stop is None else self.stop
            room = (stop - max(self.steps)) // self.move
        elif self.move < 0:
            room = (min(self.steps) - (self.stop or 0)) // -self.move
        else:
            room = 0
        return {k + self.move * min(moves, max(0, room)) for k in self.steps}
