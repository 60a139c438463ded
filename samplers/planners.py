"""Planners: frozen settings that return the plans of an iteration, almost always one.

The samplers of Flow-GRPO, MixGRPO, TempFlow and BranchGRPO differ only in which steps are noisy,
branch, and are trained on: one class each, below. A planner marks indices; it gets the noise levels
when it is called, so one planner serves every schedule.

The last step is deterministic: noise there would stay in the sample that is scored.
"""

import random
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from samplers.kernels import Kernel
from samplers.number_ranges import ABOVE_0_TO_1
from samplers.plan import Plan, steps_of
from samplers.route import Route
from samplers.solvers import DPM2M, Euler, Solver
from samplers.tree_steps import Moving, Prune, Stripes
from samplers.windows import Progressive, WindowPosition


@runtime_checkable
class Planner(Protocol):
    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]: ...


@runtime_checkable
class ChangesRoute(Protocol):
    """A planner whose plans take another route in some iterations."""

    @property
    def later(self) -> tuple[Route, ...]:
        """Routes that no plan of iteration 0 may show."""
        ...


@dataclass(frozen=True)
class Ode:
    """A deterministic plan, for evaluation and for losses that need only clean samples.

    With a `kernel`, the kernel's steps replace the solver's: for few-step models (`Scheduler`).

    kernel  noise whose steps replace the solver's, for few-step models: a part; null: the solver's
    """

    group: int = 1
    solver: Solver = Euler()
    kernel: Kernel | None = None

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        if self.kernel is None:
            return (Plan(steps_of(sigmas), roots=self.group, solver=self.solver),)
        steps = steps_of(sigmas, noisy=set(range(len(sigmas) - 1)))
        return (Plan(steps, self.kernel, self.group),)


@dataclass(frozen=True)
class Chain:
    """Independent SDE trajectories; a random `fraction` of the steps, never the last one, is
    trained.

    The last step is never trained on, as in the published code: std is tiny there, so ratios
    explode. `noisy_last` makes it noisy anyway. All draws of an iteration share the choice of steps
    (DanceGRPO's code chooses for each sample).

    fraction    share of the noisy steps that is trained, drawn in each iteration, in (0, 1];
                smaller makes updates cheaper
    noisy_last  whether the last step has noise; it is never trained
    """

    kernel: Kernel
    group: int
    fraction: float = 1.0
    shared_noise: bool = False
    noisy_last: bool = False

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"the fraction of trained steps must be in (0, 1], not {self.fraction}"
            )
        last = last_step(sigmas)
        trained = max(1, int(self.fraction * last + 1e-9))
        chosen = random.Random(f"chain/{seed}/{iteration}").sample(range(last), trained)
        key = (*sigmas,), frozenset(chosen)
        plan = self._last.get(key)
        if plan is None:
            noisy = set(range(last + self.noisy_last))
            steps = steps_of(sigmas, noisy=noisy, train=set(chosen))
            plan = Plan(steps, self.kernel, self.group, self.shared_noise)
            self._last.clear()
            self._last[key] = plan
        return (plan,)

    @cached_property
    def _last(self) -> dict[tuple[tuple[float, ...], frozenset[int]], Plan]:
        """The last plan, by its levels and trained steps: the next iteration's, if all are."""
        return {}


@dataclass(frozen=True)
class Flash:
    """Fewer, higher-order steps after a window: MixGRPO-Flash, arXiv:2507.21802.

    With n steps and a window that ends with step m, int((n - m) ratio) levels replace those after
    the window, evenly spaced on the unshifted grid. Where that is 1, the published code takes no
    step at all and scores a noisy latent; here one step is taken.

    ratio  share of the steps after the window that remains, in (0, 1]
    """

    ratio: float = 0.4
    solver: Solver = DPM2M()

    def __post_init__(self) -> None:
        ABOVE_0_TO_1.check("the ratio of steps that Flash keeps", self.ratio)

    def sigmas(self, sigmas: Sequence[float], end: int) -> tuple[float, ...]:
        """Levels of the whole plan if the window ends before step `end`."""
        last = len(sigmas) - 1
        points = max(2, int((last - end + 1) * self.ratio))
        positions = [end + (last - end) * i / (points - 1) for i in range(points)]
        return (*sigmas[:end], *(_between(sigmas, position) for position in positions))


@dataclass(frozen=True)
class Window:
    """SDE inside a window of `size` steps, ODE outside: MixGRPO, arXiv:2507.21802.

    `position` moves it with the iteration. As in MixGRPO's code, it never covers the last two
    steps. With `shared_noise` a draw's samples start from the same noise, and the steps before the
    window are computed once. Flow-GRPO-Fast is `position=Random(0, steps // 2)`.

    size      noisy and trained steps in a row, at least 1; more train more of each sample, and cost
              more
    position  where the window stands in an iteration: a part, such as `progressive` or {name:
              random, low: 0, high: 5}
    flash     fewer steps after the window, {ratio: 0.4}; null takes all of them
    """

    kernel: Kernel
    group: int
    size: int = 4
    position: WindowPosition = Progressive()
    shared_noise: bool = False
    flash: Flash | None = None

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        limit = last_step(sigmas) - 1
        if not 1 <= self.size <= limit:
            raise ValueError(
                f"a window of {self.size} steps does not fit into the first {limit} of "
                f"{limit + 2} steps (the last two are left out)"
            )
        start = self.position(iteration, seed, limit, self.size)
        end = min(start + self.size, limit)
        window = set(range(start, end))
        solver: Solver = Euler()
        if self.flash is not None:
            sigmas, solver = self.flash.sigmas(sigmas, end), self.flash.solver
        steps = steps_of(sigmas, noisy=window, train=window)
        return (Plan(steps, self.kernel, self.group, self.shared_noise, solver, solve_from=end),)


@dataclass(frozen=True)
class Fork:
    """At each step in turn, `branch` noisy children leave an ODE trunk: TempFlow, arXiv:2508.04324.

    One plan per step: leaves of a plan differ only in that step (and their root), so their rewards
    are its credit. The trunk is computed once. `at=None` is every step but the last.

    branch  children that leave the trunk at a step, at least 2; they are compared with each other
    at      steps at which they leave, from 0; null is every step but the last
    """

    kernel: Kernel
    branch: int = 6
    roots: int = 1
    at: tuple[int, ...] | None = None

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        at = tuple(range(last_step(sigmas))) if self.at is None else self.at
        if not at:
            raise ValueError("Fork needs at least one step to fork at")
        return tuple(
            Plan(
                steps_of(sigmas, noisy={k}, train={k}, branch={k: self.branch}),
                self.kernel,
                roots=self.roots,
            )
            for k in at
        )


@dataclass(frozen=True)
class Tree:
    """`branch` children at each step of `at`: BranchGRPO, arXiv:2509.06040.

    `branch` is one number, or one for each step of `at`. `split` correlates siblings' noise
    (`Plan`). `stripes` keeps only some steps noisy beside the splits (its Mix variant).

    at       steps at which each node branches, from 0, increasing
    branch   children of a node, one number or one for each step of `at`, at least 2
    split    spread of siblings' noise around their parent's, relative to its size, above 0; larger
             makes siblings differ more, null: independent noise
    stripes  steps that stay noisy beside the splits, `stripes` or `moving`; null: all
    prune    steps that are not trained, {steps: [...], ...}; null: none
    """

    kernel: Kernel
    at: tuple[int, ...]
    branch: int | tuple[int, ...] = 2
    roots: int = 1
    shared_noise: bool = False
    split: float | None = None
    stripes: Stripes | Moving | None = None
    prune: Prune | None = None

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        last = last_step(sigmas)
        branch = self.branches(last)
        noisy = (
            set(range(last)) if self.stripes is None else self.stripes.steps(last, iteration, seed)
        )
        noisy |= branch.keys()
        pruned = set[int]() if self.prune is None else self.prune.at(iteration, last)
        steps = steps_of(sigmas, noisy=noisy, train=_some(noisy - pruned), branch=branch)
        return (Plan(steps, self.kernel, self.roots, self.shared_noise, split=self.split),)

    def branches(self, last: int) -> dict[int, int]:
        """Number of children by step."""
        many = self.branch if isinstance(self.branch, tuple) else (self.branch,) * len(self.at)
        if len(many) != len(self.at):
            raise ValueError(
                f"{len(self.at)} splits at {self.at} need one branch factor each, got {many}"
            )
        if len(set(self.at)) < len(self.at) or not all(0 <= k < last for k in self.at):
            raise ValueError(
                f"splits must be different steps between 0 and {last - 1} (the last step is "
                f"deterministic), got {self.at}: set `at`, or take more steps"
            )
        return dict(zip(self.at, many, strict=True))


def _some(train: Set[int]) -> Set[int]:
    if not train:
        raise ValueError("pruning removes every step of the tree: nothing is left to train on")
    return train


CLEAN = 0.005  # levels below it are the end: noise in the step that reaches one stays in the sample


def last_step(sigmas: Sequence[float]) -> int:
    """Index of the last step that changes the sample; there must be a step before it.

    Unshifted schedules end in levels such as 0.2, 0.001, 0: the step to 0.001 counts as the last.
    """
    if len(sigmas) < 3:
        raise ValueError(
            f"a planner with noise needs at least two steps, got levels {list(sigmas)}"
        )
    last = len(sigmas) - 2
    while last > 1 and sigmas[last] < CLEAN:
        last -= 1
    return last


def _between(sigmas: Sequence[float], position: float) -> float:
    """The level at a fractional index, interpolated as on a shifted grid.

    On a grid shifted by any factor, 1 / sigma is linear in n / (n - i) for step i of n:
    interpolating there reproduces the published levels without knowing the factor, and approximates
    other lists.
    """
    n = len(sigmas) - 1
    below = min(int(position), n - 1)
    if position in (below, n):
        return sigmas[round(position)]
    a = below if below + 1 < n else below - 1  # the last level is 0: extend the curve before it
    u, w = (n / (n - i) for i in (a, a + 1))
    lo, hi = (1 / s for s in sigmas[a : a + 2])
    return 1 / (lo + (hi - lo) * (n / (n - position) - u) / (w - u))
