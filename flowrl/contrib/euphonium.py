"""Euphonium: sampling guided by a reward, training by the densities of unguided steps."""

from dataclasses import dataclass
from typing import Literal

import torch

from flowrl.algorithm import Algorithm
from flowrl.contrib.potential_tree import Potential
from flowrl.credit.advantages import Clip, Estimator, Rescale, Standardize, Sum
from flowrl.credit.values import Context, Credit
from flowrl.errors import UserError
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from samplers import Chain, ConstantSDE, Guided, Kernel, Looking, RewardDrift, RewardGuide


@dataclass(frozen=True)
class WithoutOutcome:
    """Drops the advantage of the outcome: A <- 0. What stands behind it, such as `Potential`, is
    all that trains."""

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return credit._replace(value=torch.zeros_like(credit.value))


@rests_on("arrays", "mm_euphonium_flux_step")
def euphonium(
    *, steps: int = 16, group: int = 8, eta: float = 0.25, clip: float = 1e-4,
    fraction: float = 0.6, scale: float | None = 0.2, kl_beta: float = 3.125, first: int = 12,
    probe: float = 0.1, gradient: Literal["spsa", "reward"] = "spsa", outcome: float = 1.0,
    process: float = 0.0, shared_noise: bool = True, kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """Euphonium, arXiv:2602.04928: sampling is guided by a reward, and the densities of the
    unguided steps are trained, so that the policy learns to reach the guided samples. 16 steps, eta
    0.25, group 8, clip 1e-4, 60 % of the steps trained, guidance from step 12 on. `scale` is the
    shift per unit gradient; null is eta^2 / (2 kl_beta).

    `gradient: spsa` estimates the gradient from two scores, which works with any reward (an option
    of the code, at scale 0.2); `reward` uses the gradient of a reward with `differentiable` at the
    predicted clean sample. `process` is the weight of its dual credit: the reward of the predicted
    sample after each step, standardised by group and step; the code uses 1, with `outcome` 1.
    `intermediate_rewards` sets a process reward, which is also used for guidance; without it the
    run's rewards are used for both.

    Differences: rewards see decoded predictions, where the code's process reward sees noisy
    latents; the gradient is divided by each sample's norm, where the code divides by the batch's;
    the two advantages are added, where the code adds two clipped losses. `probe` is our choice.

    scale     shift of a step's mean per unit gradient, at least 0; larger follows the reward more;
              null is eta^2 / (2 kl_beta)
    kl_beta   weight of the KL from which the shift follows if `scale` is null, above 0; larger
              shifts less
    first     step from which sampling is guided, counted from 0, at least 0
    probe     distance, in the predicted clean sample, at which `spsa` scores two samples, above 0
    gradient  `spsa` estimates the reward's gradient from two scores; `reward` takes that of a
              reward with `differentiable`
    outcome   weight of the advantage of the finished sample beside `process`, at least 0; 1 where
              `process` is 0
    process   weight of the advantage of the predicted sample after each step, at least 0; 0 leaves
              it out
    """
    standardize = Standardize("group", correction=1, eps=1e-8)
    by = "slope" if gradient == "reward" else "probes"
    guide = RewardGuide(RewardDrift(scale, kl_beta), first, probe, by)
    plan = Guided(Chain(kernel or ConstantSDE(eta), group, fraction, shared_noise), guide)
    if process == 0 and outcome != 1:
        raise UserError(f"outcome is {outcome}, which has no effect without process: set process")
    share = Rescale(1.0, outcome) if outcome else WithoutOutcome()
    dual = (share, Potential(process), Clip()) if process else ()
    return Algorithm(
        steps=steps,
        plan=Looking(plan, 1, at="trained") if process else plan,
        advantage=Estimator((standardize, Clip(), Sum(partial=True), *dual)),
        likelihood=Transition(),
        loss=Surrogate(clip, clip),
    )
