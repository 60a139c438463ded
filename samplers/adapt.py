"""Treat models that predict the noise or the VP velocity as rectified flows.

The states of a variance-preserving model are x = alpha x0 + s noise with alpha^2 + s^2 = 1. Divided
by alpha + s, such a state is the flow's state at sigma = s / (alpha + s), so every kernel, solver
and plan works for such a model unchanged. A density changes by the constant factor (alpha + s) per
dimension, which cancels in ratios.

It does not cancel in matching losses: in one state the flow velocity's error is the noise's error
over (1 - sigma). Published epsilon losses are therefore velocity losses with the weight (1 -
sigma)^2, the matching weighting `epsilon`. Do not clip or threshold the prediction of the clean
sample.
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from samplers.kernels import lift, per_row


def level(alphas_cumprod: Float[Tensor, "*k"]) -> Float[Tensor, "*k"]:
    """Return the flow's noise level sigma = s / (alpha + s), where alpha^2 = alphas_cumprod and
    s^2 = 1 - alphas_cumprod."""
    alpha, s = alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()
    return s / (alpha + s)


def scale(sigma: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return alpha + s at a noise level: a VP state divided by it is the flow's state."""
    return 1 / ((1 - sigma) ** 2 + sigma**2).sqrt()


def to_vp(z: Float[Tensor, "n *d"], sigma: Float[Tensor, " n"]) -> Float[Tensor, "n *d"]:
    """Convert a flow's state to the variance-preserving state alpha x0 + s noise."""
    z = lift(z)
    return per_row(scale(lift(sigma)), z) * z


def from_vp(x: Float[Tensor, "n *d"], sigma: Float[Tensor, " n"]) -> Float[Tensor, "n *d"]:
    """Inverse of `to_vp`."""
    x = lift(x)
    return x / per_row(scale(lift(sigma)), x)


Prediction = Literal["epsilon", "v_prediction", "sample"]


def flow_velocity(kind: Prediction, x: Tensor, prediction: Tensor, sigma: Tensor) -> Tensor:
    """The flow velocity, noise - x0 [n *d], from a model's prediction at the VP states x [n *d].

    `v_prediction` is alpha noise - s x0 (arXiv:2202.00512). A noise prediction does not determine
    x0 at sigma = 1, nor does an x0 prediction determine the noise at sigma = 0.
    """
    x, prediction, sigma = lift(x), lift(prediction), lift(sigma)
    factor = scale(sigma)
    alpha, s = (per_row(a * factor, x) for a in (1 - sigma, sigma))
    if kind == "epsilon":
        return prediction - (x - s * prediction) / alpha
    if kind == "v_prediction":
        return (s * x + alpha * prediction) - (alpha * x - s * prediction)
    return (x - alpha * prediction) / s - prediction
