"""DenseGRPO: a step is credited with the reward that it gained."""

from dataclasses import dataclass
from typing import Literal

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Clip, Estimator, Standardize, Sum
from flowrl.credit.choices import Choices
from flowrl.credit.intermediate import gained, refuse_intermediate
from flowrl.credit.values import Context, Credit
from flowrl.errors import UserError
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import KlForm, Scale, anchors
from samplers import Chain, FlowSDE, Kernel, Looking, TableSDE


@dataclass(frozen=True)
class StepGain:
    """Reward gained in each step: DenseGRPO (arXiv:2601.20218).

        value_k = V_{k+1} - V_k

    Gains add up to the sample's score minus the score of its noise. A step without noise is masked.
    With `relative` False the value is V_{k+1} alone, the paper's weaker baseline.
    """

    other_rewards = False
    relative: bool = True

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return gained(credit, context, self.relative)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_intermediate(choices, chains=False)


@rests_on("paper")
def dense_grpo(
    *, steps: int = 10, group: int = 24, eta: float = 0.7, noise: tuple[float, ...] = (),
    clip: float = 1e-4, kl: float = 0.04, completion: int | None = None,
    reward: Literal["gain", "value"] = "gain", scale: Scale = "group",
    kl_form: KlForm = "published", kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """DenseGRPO, arXiv:2601.20218: each step is credited with the reward gained between the clean
    samples that an ODE reaches from the states before and after it, standardised per group and
    step. SD3.5-M: 10 steps, group 24, KL 0.04 (GenEval, OCR) or 0.01 (PickScore), with Flow-GRPO's
    loss. `noise` is its table of calibrated noise, one number per step except the last, as found by
    `flowrl calibrate`; without it the noise is Flow-GRPO's with `eta`. `reward: value` is its
    weaker baseline; in the paper's ablation `completion: 1` is worse than no dense reward at all.

    Differences: the clip range is Flow-GRPO's, since the paper does not give one.

    noise   Flow-SDE's noise g of each step but the last, each above 0, as `flowrl calibrate` finds
            it; empty takes `eta`
    reward  `gain` of a step, the reward of the completed state after it minus the one before; or
            that `value` after it alone
    """
    if noise and kernel is not None:
        raise UserError(
            "noise is a table of Flow-SDE's noise and cannot be combined with another kernel: "
            "give only one"
        )
    default_kernel: Kernel = TableSDE(noise) if noise else FlowSDE(eta)
    return Algorithm(
        steps=steps,
        plan=Looking(Chain(kernel or default_kernel, group), completion, first=reward == "gain"),
        advantage=Estimator((StepGain(reward == "gain"), Sum(), Standardize(scale), Clip())),
        likelihood=Transition(kl_form=kl_form),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )
