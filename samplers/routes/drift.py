"""Sampling towards a reward: a noisy step gets a drift, but its density stays undrifted."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from samplers.kernels import Gaussian, per_row
from samplers.number_ranges import AT_LEAST_0, POSITIVE


@dataclass(frozen=True)
class RewardDrift:
    """A noisy step whose mean is shifted along a reward's gradient: Euphonium (arXiv:2602.04928).

    Formula: mean <- mean + c g, c = scale, or std^2 / (2 h kl_beta), g the gradient of the reward
    in the state, by default over its norm

    normalised  divides each sample's gradient by its norm. The authors divide by the norm of the
                whole batch, so that a sample depends on the rest of its batch
    by_h        multiplies c by the step h = sigma - sigma_next

    scale    length of the shift, in the state's units with `normalised`, at least 0; null takes
             std^2 / (2 h kl_beta)
    kl_beta  weight of the divergence to the unshifted step, above 0; larger shifts less; no effect
             with a `scale`
    """

    scale: float | None = 0.1
    kl_beta: float = 0.1
    normalised: bool = True
    by_h: bool = False

    def __post_init__(self) -> None:
        POSITIVE.check("RewardDrift's kl_beta", self.kl_beta)
        AT_LEAST_0.check("RewardDrift's scale", self.scale)

    def direction(self, gradient: Float[Tensor, "n *d"]) -> Float[Tensor, "n *d"]:
        """Gradients divided by their norms."""
        norm = gradient.flatten(1).square().sum(1).sqrt()
        return gradient / per_row(norm + 1e-8, gradient)

    def __call__(
        self,
        plain: Gaussian,
        gradient: Float[Tensor, "n *d"],
        sigma: Float[Tensor, " n"],
        sigma_next: Float[Tensor, " n"],
    ) -> Gaussian:
        """The shifted step, with the std of the plain step."""
        h = sigma - sigma_next
        if self.scale is None:
            c = plain.std**2 / h / (2 * self.kl_beta)
        else:
            c = torch.full_like(h, self.scale)
        c = c * h if self.by_h else c
        g = self.direction(gradient) if self.normalised else gradient
        return Gaussian(plain.mean + per_row(c, g) * g, plain.std)
