"""Sampling towards a reward: a noisy step gets a drift, but its density stays undrifted."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from samplers.kernels import Gaussian, per_row


@dataclass(frozen=True)
class RewardDrift:
    """A noisy step whose mean is shifted along a reward's gradient: Euphonium (arXiv:2602.04928).

    Formula: mean <- mean + c g, c = scale, or std^2 / (2 h kl_beta), g the gradient of the reward
    in the state, by default over its norm

    normalised  divides each sample's gradient by its norm. The authors divide by the norm of the
                whole batch, so that a sample depends on the rest of its batch
    by_h        multiplies c by the step h = sigma - sigma_next
    """

    scale: float | None = 0.1
    kl_beta: float = 0.1
    normalised: bool = True
    by_h: bool = False

    def __post_init__(self) -> None:
        if self.kl_beta <= 0 or (self.scale is not None and self.scale < 0):
            raise ValueError(
                f"kl_beta must be above 0 and scale at least 0 (or null), not {self.kl_beta} "
                f"and {self.scale}"
            )

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


@dataclass(frozen=True)
class RewardGuide:
    """Shifts noisy steps from step `first` on by a reward of the predicted clean sample, x0(x) = x
    - sigma v(x).

        g = (r(x0(x + probe u)) - r(x0(x - probe u))) / (2 probe) u, u random signs  (probes: SPSA)
        g = dr / dx0 at x0(x)                                                         (slope)

    Probes need no derivative of the reward, and cost two evaluations and two rewards per state. The
    slope treats v as a constant, so it needs one reward, and neither an evaluation nor a gradient
    of the network. Training uses the density of the plain step.
    """

    drift: RewardDrift = RewardDrift()
    first: int = 0
    probe: float = 0.1
    by: Literal["probes", "slope"] = "probes"

    def __post_init__(self) -> None:
        if self.probe <= 0 or self.first < 0:
            raise ValueError(
                f"probe must be above 0 and first at least 0, not {self.probe} and {self.first}"
            )
