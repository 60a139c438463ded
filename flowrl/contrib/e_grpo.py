"""E-GRPO: consecutive steps of low entropy merged into one noisy step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Clip, Estimator, Standardize, Sum
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.number_checks import check_number
from flowrl.recipes.evidence import rests_on
from samplers import FlowSDE, Kernel
from samplers.number_ranges import ANY_NUMBER
from samplers.placements import first_steps
from samplers.plan import Plan, steps_of


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

    def __post_init__(self) -> None:
        check_number("Merged's least", self.least, ANY_NUMBER)

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        kernel, first = self.kernel.bound(sigmas), first_steps(sigmas, self.share)
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


@rests_on("summary")
def e_grpo(
    *, steps: int = 16, group: int = 12, eta: float = 0.7, clip: float = 1e-4,
    share: float = 0.5, least: float | None = None, kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """E-GRPO, arXiv:2601.00423, according to its abstract: consecutive steps of low entropy are
    merged into one noisy step, all others are deterministic, and samples that share a merged step
    are compared. 16 steps, of which the first half can be noisy, 12 children each, eta 0.7,
    clip 1e-4.

    Our choice: steps are merged until they reach `least` nats per dim, by default the mean over
    unmerged steps (the abstract does not give the paper's threshold). The released run merges
    nothing, which is `least: -100`.

    group  children that leave the trunk at each noisy step and are compared, at least 2; more make
           advantages less noisy
    share  share of the steps, from the first on, that may be noisy, in (0, 1]
    least  entropy, any number of nats per dimension, up to which steps are merged into one; larger
           merges more; null is the mean of the unmerged steps
    """
    standardize = Standardize("group", correction=1, eps=1e-8)
    return Algorithm(
        steps=steps,
        plan=Merged(kernel or FlowSDE(eta), group, 1, share, least),
        advantage=Estimator((standardize, Clip(), Sum(partial=True))),
        likelihood=Transition(),
        loss=Surrogate(clip, clip),
    )
