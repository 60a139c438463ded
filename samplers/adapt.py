"""Models that predict the noise or the VP velocity, as rectified flows.

A variance-preserving model knows x = alpha x0 + s noise with alpha^2 + s^2 = 1. Divided by
alpha + s that is the flow's state at sigma = s / (alpha + s), so every kernel, solver and plan
serves such a model as it is. A density changes by the constant factor (alpha + s) per dimension,
which no ratio sees.

Matching losses do see it: in one state the flow velocity's error is the noise's error over
(1 - sigma). Published epsilon losses are therefore velocity losses with the weight (1 - sigma)^2,
the matching weighting `epsilon`. Do not clip or threshold the prediction of the clean sample.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.kernels import lift, per_row


def level(alphas_cumprod: Float[Tensor, "*k"]) -> Float[Tensor, "*k"]:
    """sigma = s / (alpha + s) of alpha^2 = alphas_cumprod, s^2 = 1 - alphas_cumprod."""
    alpha, s = alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()
    return s / (alpha + s)


def scale(sigma: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """alpha + s of a level: a VP state over it is the flow's."""
    return 1 / ((1 - sigma) ** 2 + sigma**2).sqrt()


@dataclass(frozen=True)
class VPSchedule:
    """The noise levels that a VP model was trained at: alphas_cumprod by integer time."""

    alphas_cumprod: tuple[float, ...]

    @property
    def levels(self) -> Float[Tensor, " k"]:
        """sigma by time, rising; float64."""
        return level(torch.tensor(self.alphas_cumprod, dtype=torch.float64))

    def sigmas(self, timesteps: tuple[int, ...]) -> tuple[float, ...]:
        """The list for a plan that visits these times, then 0."""
        levels = self.levels
        return (*(float(levels[t]) for t in timesteps), 0.0)

    def timestep(self, sigma: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
        """The nearest time. Outside the levels of training, by more than a step, is an error."""
        levels = self.levels
        high = 2 * levels[-1] - levels[-2]
        if (sigma < 0.5 * levels[0]).any() or (sigma > high).any():
            raise ValueError(
                f"sigma from {float(sigma.min()):.4f} to {float(sigma.max()):.4f} is outside the "
                f"model's training levels, {float(levels[0]):.4f} to {float(levels[-1]):.4f}"
            )
        at = sigma.double().cpu()
        above = torch.searchsorted(levels, at).clamp(1, len(levels) - 1)
        nearer_below = at - levels[above - 1] < levels[above] - at
        return (above - nearer_below.long()).to(sigma.device)


def to_vp(z: Float[Tensor, "n *d"], sigma: Float[Tensor, " n"]) -> Float[Tensor, "n *d"]:
    """The variance-preserving state alpha x0 + s noise of a flow's state."""
    z = lift(z)
    return per_row(scale(lift(sigma)), z) * z


def from_vp(x: Float[Tensor, "n *d"], sigma: Float[Tensor, " n"]) -> Float[Tensor, "n *d"]:
    """The reverse of `to_vp`."""
    x = lift(x)
    return x / per_row(scale(lift(sigma)), x)


Prediction = Literal["epsilon", "v_prediction", "sample"]


def flow_velocity(kind: Prediction, x: Tensor, prediction: Tensor, sigma: Tensor) -> Tensor:
    """noise - x0 [n *d] of what a model predicts at the VP states x [n *d].

    `v_prediction` is alpha noise - s x0 (arXiv:2202.00512). A noise prediction says nothing of x0
    at sigma = 1, nor a clean one of the noise at sigma = 0.
    """
    x, prediction, sigma = lift(x), lift(prediction), lift(sigma)
    factor = scale(sigma)
    alpha, s = (per_row(a * factor, x) for a in (1 - sigma, sigma))
    if kind == "epsilon":
        return prediction - (x - s * prediction) / alpha
    if kind == "v_prediction":
        return (s * x + alpha * prediction) - (alpha * x - s * prediction)
    return (x - alpha * prediction) / s - prediction
