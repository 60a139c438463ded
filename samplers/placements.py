"""Planners that place noisy steps one by one: scattered steps."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from samplers.kernels import Kernel
from samplers.plan import Plan, steps_of
from samplers.planners import last_step


def first_steps(sigmas: Sequence[float], share: float) -> int:
    """The number of first steps that a share of all steps has, without the deterministic last."""
    if not 0 < share <= 1:
        raise ValueError(f"the share of noisy steps must be in (0, 1], not {share}")
    return min(max(1, int((len(sigmas) - 1) * share + 1e-9)), last_step(sigmas))


@dataclass(frozen=True)
class Scattered:
    """SDE in `count` steps, chosen at random from the first `share` of the steps in each iteration,
    and ODE elsewhere: Flow-DPPO (arXiv:2606.11025). All draws of an iteration share the choice.

    count  noisy and trained steps, drawn in each iteration, at least 1; more train more of each
           sample, and cost more
    share  share of the steps, from the first on, that they are drawn from, in (0, 1]
    """

    kernel: Kernel
    group: int
    count: int = 3
    share: float = 0.5
    shared_noise: bool = False

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        first = first_steps(sigmas, self.share)
        if not 1 <= self.count <= first:
            raise ValueError(f"{self.count} noisy steps do not fit into the first {first} steps")
        chosen = random.Random(f"scattered/{seed}/{iteration}").sample(range(first), self.count)
        steps = steps_of(sigmas, noisy=set(chosen), train=set(chosen))
        return (Plan(steps, self.kernel, self.group, self.shared_noise),)
