"""A tree whose nodes have rewards of their own, which may abstain."""

import math
from dataclasses import dataclass

import torch

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Clip, Estimator, Standardize, Sum
from flowrl.credit.choices import Choices
from flowrl.credit.intermediate import needed_intermediate, refuse_intermediate
from flowrl.credit.values import Context, Credit
from flowrl.errors import UserError
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.number_checks import check_number
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors
from samplers import ConstantSDE, Kernel, Looking, Tree
from samplers.number_ranges import AT_LEAST_0


@dataclass(frozen=True)
class Potential:
    """Credit plus a step-wise reward that may abstain, as in PARM (arXiv:2501.13926).

        A_k <- A_k + weight (V_{k+1} - mean) / (std + eps)

    mean and std are over the group's scored nodes at step k. Nothing is added where the
    intermediate reward abstains (None). It comes after the transforms that standardise the outcome.
    """

    other_rewards = True
    weight: float = 1.0
    eps: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise UserError(
                f"the weight of intermediate rewards must be at least 0, not {self.weight}: "
                "otherwise training would lower them"
            )
        check_number("Potential's eps", self.eps, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        intermediate = needed_intermediate(context)
        scores = intermediate.values.cpu()
        weights = context.weights if intermediate.weights is None else intermediate.weights
        scored = torch.zeros_like(credit.mask)
        scored[:, :-1, 0] = intermediate.complete.cpu()[:, 1:]
        total = torch.zeros_like(credit.value)
        total[:, :-1, 0] = scores[:, 1:].double() @ weights.double()

        states = Credit(total * scored, scored & credit.mask)
        potential = Standardize(eps=self.eps)(states, context).value
        return credit._replace(value=credit.value + self.weight * potential * credit.mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_intermediate(choices, chains=False)


@rests_on("ours")
def potential_tree(
    *, steps: int = 16, at: tuple[int, ...] = (0, 3, 6, 9), branch: int = 2, eta: float = 0.3,
    clip: float = 1e-4, kl: float = 0.0, weight: float = 1.0, completion: int | None = 1,
    kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """BranchGRPO's tree with a step-wise reward that may abstain, after the potential assessment of
    PARM, arXiv:2501.13926: a judge of predicted clean images decides whether they can still become
    good, and returns None if they are not clear enough to judge. Set it in `intermediate_rewards`.

    This is our own construction: PARM selects samples at inference, and only its abstract was used,
    so the numbers are our choice. A node's credit is its leaves' credit, standardised by depth,
    plus `weight` times the standardised reward of its own image, if it has one.

    at      steps at which each node splits, counted from 0 and before the last step; each
            multiplies the samples by `branch`
    branch  children of a node at each split, at least 2
    weight  weight of the standardised reward of a node's own image, at least 0; 0 leaves its
            leaves' credit alone
    """
    standardize = Standardize("group")
    return Algorithm(
        steps=steps,
        plan=Looking(Tree(kernel or ConstantSDE(eta), at, branch), completion, first=False),
        advantage=Estimator((Sum(), standardize, Potential(weight), Clip())),
        likelihood=Transition(),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )
