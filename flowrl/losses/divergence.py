"""Losses on ratios without a clip range: a divergence or a penalty keeps the policy near."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.credit.choices import Choices
from flowrl.errors import UserError
from flowrl.likelihoods.rows import Evaluations, Rows
from flowrl.likelihoods.transition import Transition, step_divergence
from flowrl.losses.base import PolicyTerm, RatioLoss


@dataclass(frozen=True, kw_only=True)
class TrustRegion(RatioLoss):
    """Policy gradient within a trust region per step: Flow-DPPO (arXiv:2606.11025, eq. 18).

        loss = 0 if D >= most and A away > 0 else -r A,  away = r - 1, or log r - D

    D = |mean - mean_old|^2 / 2 q^2, a mean over the latent's dims, is the exact divergence of the
    new step from the sampled one. Outside the region a row still learns if that leads back. `most`
    depends on the kernel and its noise: the paper has 1e-7 with Flow-SDE and 1e-6 with CPS, the
    published programs 1e-5 and 1e-6.

    away  ratio, as published; first_order, the sign of the change of D itself (the paper's appendix
          E, not used in its runs)

    most  divergence at which the region ends, above 0; larger lets a policy move farther in an
          update
    """

    homogeneous = True
    most: float = 1e-7
    away: Literal["ratio", "first_order"] = "ratio"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.most < math.inf:
            raise UserError(
                f"the maximum divergence of a trust region must be above 0, not {self.most}"
            )

    def refuses(self, choices: Choices) -> str | None:
        """Refuses likelihoods that do not keep the means of steps."""
        likelihood = choices.likelihood
        if not isinstance(likelihood, Transition) or not likelihood.keep_mean:
            return "TrustRegion compares the means of steps: use Transition(means=True)"
        return super().refuses(choices)

    def policy(self, log_ratio: Tensor, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        gap = step_divergence(evaluations["new"], evaluations["old"], rows).detach()
        lead = log_ratio.detach() - (gap if self.away == "first_order" else 0.0)
        outside = gap >= self.most
        low, high = (outside & (rows.advantage * sign > 0) & (lead * sign > 0) for sign in (-1, 1))
        # exp's slope may be inf outside, and 0 times inf is NaN
        inside = log_ratio.masked_fill(low | high, 0.0)
        value = torch.where(low | high, 0.0, -rows.advantage * inside.exp())
        return value, {
            "divergence": gap,
            "outside": outside.to(gap),
            "clipped_low": low.to(gap),
            "clipped_high": high.to(gap),
        }
