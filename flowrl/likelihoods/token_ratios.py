"""Arithmetic on tokens' log-probabilities: ratios at four levels, divergences, mismatch.

b rows, t tokens. `mask` is True for tokens in the loss; entries elsewhere are never read.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

RatioLevel = Literal["token", "sequence", "sequence_token", "product"]
KLEstimator = Literal["k1", "k2", "k3"]


def row_sum(value: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b 1"]:
    """Sum over a row's tokens in the loss."""
    return torch.where(mask, value, 0.0).sum(1, keepdim=True)


def row_mean(value: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]) -> Float[Tensor, "b 1"]:
    """Mean over a row's tokens in the loss; 0 for a row without any."""
    return row_sum(value, mask) / mask.sum(1, keepdim=True).clamp(min=1)


def log_ratio(
    new: Float[Tensor, "b t"],
    old: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    level: RatioLevel = "token",
) -> Float[Tensor, "b t"]:
    """Log-ratios log p_new - log p_old per token or sequence, 0 where masked.

    token           of each token
    sequence        the mean over the row's tokens, at each of them (GSPO, arXiv:2507.18071)
    sequence_token  the same value, with only the token's gradient (GSPO-token)
    product         the sum over the row's tokens: the completion is one action (RLOO,
                    arXiv:2402.14740)
    """
    per_token = torch.where(mask, new - old, 0.0)
    if level == "token":
        return per_token
    if level == "product":
        return row_sum(per_token, mask).expand_as(per_token) * mask
    mean = row_mean(per_token, mask).expand_as(per_token) * mask
    if level == "sequence":
        return mean
    return torch.where(mask, new - new.detach(), 0.0) + mean.detach()


def divergence(
    new: Float[Tensor, "b t"], ref: Float[Tensor, "b t"], estimate: KLEstimator = "k3"
) -> Float[Tensor, "b t"]:
    """KL(new | ref) estimated from one sample per token, by Schulman's three estimators.

        k1 = -d,  k2 = d^2 / 2,  k3 = e^d - d - 1,  d = log p_ref - log p_new

    k1 and k3 are unbiased. As a loss on on-policy samples, k1 has zero mean gradient, k2 has the
    gradient of KL(new | ref) and k3 the gradient of KL(ref | new): see `Anchor.corrected`.
    """
    d = ref - new
    if estimate == "k1":
        return -d
    if estimate == "k2":
        return d.square() / 2
    return d.exp() - d - 1


def mismatch(
    old: Float[Tensor, "b t"],
    sampled: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    level: Literal["token", "sequence"],
) -> Float[Tensor, "b u"]:
    """Ratio of the trainer's probability to the sampling engine's: p_old / p_sampled per token (u =
    t), or its product over the row (u = 1). A token without the engine's probability (NaN) has
    ratio 1."""
    per_token = torch.where(mask, old - sampled, 0.0).nan_to_num(0.0)
    return (per_token if level == "token" else per_token.sum(1, keepdim=True)).exp()


def bounded(
    ratio: Float[Tensor, "b u"], mode: Literal["truncate", "mask"], low: float, high: float
) -> Float[Tensor, "b u"]:
    """Clip ratios to low..high, or set ratios outside to 0."""
    if mode == "truncate":
        return ratio.clamp(low, high)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
