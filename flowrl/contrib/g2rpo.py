"""G2RPO: children of a trunk that finish on several grids of levels."""

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Clip, Estimator, Standardize, Sum
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from samplers import FlowSDE, Kernel
from samplers.plan import Plan, steps_of
from samplers.planners import last_step


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
                noise_of=index * len(self.grids),
            )
            for index, k in enumerate(self.at)
            for grid in self.grids
        )  # fmt: skip


@rests_on("code")
def g2rpo(
    *, steps: int = 16, group: int = 12, eta: float = 0.7, clip: float = 1e-4,
    at: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7), grids: tuple[int, ...] = (1, 2),
    kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """G2RPO, arXiv:2510.01982: at each step of `at` 12 noisy children leave an ODE trunk, and each
    child is completed on several grids, whose scores are standardised separately. FLUX: 16 steps,
    eta 0.7, clip 1e-4, grids of all levels and of every second level. Set `train.updates:
    8`, the published number of optimizer steps per iteration.

    Differences: the advantages of a child's grids train the same step in separate rows, so that
    their losses are averaged, where the code adds the advantages, clipped at 5; an optimizer step
    has rows of all steps, where the code takes one optimizer step per denoising step.

    group  children that leave the trunk at each step of `at` and are compared, at least 2; more
           make advantages less noisy
    at     steps at which children leave the trunk, counted from 0 and before the last step
    grids  grids on which each child is completed: 1 takes every remaining level, j every j-th; each
           costs a completion and a score
    """
    standardize = Standardize("group", correction=1, eps=1e-8)
    return Algorithm(
        steps=steps,
        plan=Granular(kernel or FlowSDE(eta), group, at, grids),
        advantage=Estimator((standardize, Clip(), Sum(partial=True))),
        likelihood=Transition(),
        loss=Surrogate(clip, clip),
    )
