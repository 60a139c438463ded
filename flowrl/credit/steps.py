"""Weights on the steps of a trajectory and on the depths of a tree, carried by the advantages.

A clipped surrogate is positively homogeneous in the advantage, so the advantages can carry the
weight of a step's loss.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.credit.choices import Choices, image_plans, text_plans
from flowrl.credit.values import Context, Credit
from flowrl.errors import UserError
from flowrl.number_checks import check_number
from samplers.kernels import is_affine
from samplers.number_ranges import ANY_NUMBER


@runtime_checkable
class CarriesWeights(Protocol):
    """A transform whose factors on the advantages are meant as weights of the loss, so that it
    needs a loss that is homogeneous in the advantage."""

    @property
    def carries_weights(self) -> bool: ...


@dataclass(frozen=True)
class EvenGradients:
    """Weights that equalise the gradient sizes of all steps: Flash-GRPO (arXiv:2605.15980).

        A_k <- A_k w_k / mean_{j < first} w_j,  w = q / |d mean / d v|

    q is the step's std. The gradient of a log-density in the velocity has the size 1 / w for noise
    that does not depend on v. The mean is over the first `share` of the steps, from which trained
    steps are drawn, so that a step's weight does not depend on the others drawn.

    share  share of the steps, from the first on, over which the mean is taken, in (0, 1]
    """

    carries_weights = True
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"the share of the steps must be in (0, 1], not {self.share}")

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return credit._replace(value=credit.value * context.step_weights(self._weights))

    def _weights(self, std: Tensor, h: Tensor, slope: Tensor) -> Float[Tensor, " k"]:
        del h
        weight = std / slope.abs()
        first = min(max(1, int(self.share * len(weight) + 1e-6)), max(1, len(weight) - 1))
        return weight / weight[:first].mean()

    def refuses(self, choices: Choices) -> str | None:
        if text_plans(choices) or any(plan.kernel is None for plan in image_plans(choices)):
            return (
                "EvenGradients weights noisy denoising steps: leave it out, or use a plan with "
                "such steps"
            )
        for kernel in (plan.kernel for plan in image_plans(choices)):
            if kernel is not None and not is_affine(kernel):
                return (
                    "EvenGradients divides by the slope of a step's mean in the velocity, but the "
                    f"kernel {type(kernel).__name__} does not say that its mean is a x + b v: "
                    "leave EvenGradients out, or set `affine = True` in the kernel if it is"
                )
        return None


@dataclass(frozen=True)
class EvenDepths:
    """Weights by depth, because most edges of a tree come after the last split (our own method).

        A_k <- A_k w_k,  w_k = nodes_k^-power, over its mean over the edges of noisy steps

    In a mean over edges, power 1 weights all noisy steps equally, and power 0 all edges. A
    power below 0 favours steps with many edges.

    power  degree of the weights, any number; 1 weighs steps equally, 0 edges
    """

    carries_weights = True
    power: float = 1.0

    def __post_init__(self) -> None:
        check_number("EvenDepths's power", self.power, ANY_NUMBER)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        columns = context.columns
        nodes = torch.tensor(columns.nodes, dtype=torch.float64)
        noisy = torch.tensor(columns.noisy, dtype=torch.float64)
        weight = nodes**-self.power
        mean = (weight * nodes * noisy).sum() / (nodes * noisy).sum().clamp(min=1)
        return credit._replace(value=credit.value * (weight / mean)[:, None])
