"""Planners that place noisy steps one by one: scattered steps, merged steps, several finishes."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samplers.kernels import Kernel
from samplers.plan import Plan, steps_of
from samplers.planners import last_step


def _first(sigmas: Sequence[float], share: float) -> int:
    """The number of first steps that a share of all steps has, without the deterministic last."""
    if not 0 < share <= 1:
        raise ValueError(f"the share of noisy steps must be in (0, 1], not {share}")
    return min(max(1, int((len(sigmas) - 1) * share + 1e-9)), last_step(sigmas))


@dataclass(frozen=True)
class Scattered:
    """SDE in `count` steps, chosen at random from the first `share` of the steps in each iteration,
    and ODE elsewhere: Flow-DPPO (arXiv:2606.11025). All draws of an iteration share the choice."""

    kernel: Kernel
    group: int
    count: int = 3
    share: float = 0.5
    shared_noise: bool = False

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        first = _first(sigmas, self.share)
        if not 1 <= self.count <= first:
            raise ValueError(f"{self.count} noisy steps do not fit into the first {first} steps")
        chosen = random.Random(f"scattered/{seed}/{iteration}").sample(range(first), self.count)
        steps = steps_of(sigmas, noisy=set(chosen), train=set(chosen))
        return (Plan(steps, self.kernel, self.group, self.shared_noise),)


@dataclass(frozen=True)
class Merged:
    """Fork from an ODE trunk at steps of high entropy and merge steps of low entropy: E-GRPO
    (arXiv:2601.00423).

    A step with std q has an entropy of log(q sqrt(2 pi e)) nats per dimension. Within the first
    `share` of the steps, consecutive steps are merged into one noisy step until its entropy reaches
    `least` nats; None is the mean entropy of those steps before merging. The trunk keeps all of its
    levels, and an ODE finishes the samples. Each merged step is a plan of its own: the model is
    called once more for a trunk state at which one plan forks and which a later plan passes.
    """

    kernel: Kernel
    branch: int = 12
    roots: int = 1
    share: float = 0.5
    least: float | None = None

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        kernel, first = self.kernel.bound(sigmas), _first(sigmas, self.share)
        alone = [step_entropy(kernel, sigmas[k], sigmas[k + 1]) for k in range(first)]
        least = sum(alone) / first if self.least is None else self.least
        plans, k = list[Plan](), 0
        while k < first:
            end = k + 1
            while end < first and step_entropy(kernel, sigmas[k], sigmas[end]) < least - 1e-9:
                end += 1
            levels = (*sigmas[: k + 1], *sigmas[end:])
            steps = steps_of(levels, noisy={k}, train={k}, branch={k: self.branch})
            plans.append(Plan(steps, kernel, self.roots))
            k = end
        return tuple(plans)


def step_entropy(kernel: Kernel, sigma: float, sigma_next: float) -> float:
    """Entropy of a noisy step, in nats per dimension."""
    zero = torch.zeros(1, 1, dtype=torch.float64)
    at, to = (torch.tensor([s], dtype=torch.float64) for s in (sigma, sigma_next))
    return float(kernel(zero, zero, at, to).std.log()) + 0.5 * math.log(2 * math.pi * math.e)


@dataclass(frozen=True)
class Granular:
    """Forks from an ODE trunk whose children finish on several grids of levels: G2RPO
    (arXiv:2510.01982).

    At each step of `at` there is one plan for each of `grids`: after the noisy step, grid j takes
    every j-th of the remaining levels. The plans of a step draw the same children, which are scored
    once per grid.
    """

    kernel: Kernel
    branch: int = 12
    at: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    grids: tuple[int, ...] = (1, 2)
    roots: int = 1

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        last = last_step(sigmas)
        if not self.at or not all(0 <= k < last for k in self.at):
            raise ValueError(f"steps to fork at must be between 0 and {last - 1}, got {self.at}")
        if not self.grids or min(self.grids) < 1:
            raise ValueError(
                "each grid must be at least 1 (1 keeps every level, j every j-th), got "
                f"{self.grids}"
            )
        return tuple(
            Plan(
                steps_of(
                    (*sigmas[: k + 1], *sigmas[k + 1 : -1 : grid], sigmas[-1]),
                    noisy={k}, train={k}, branch={k: self.branch},
                ),
                self.kernel.bound(sigmas),
                self.roots,
                noise_of=place * len(self.grids),
            )
            for place, k in enumerate(self.at)
            for grid in self.grids
        )  # fmt: skip
