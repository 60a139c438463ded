"""Ratio losses from the language-model literature.

All except VESPO and GMPO read only a likelihood's ratios, so they can train image models too: a
ratio then belongs to one denoising step.

| loss      | policy term, with ratio r and advantage A           | source           |
| --------- | --------------------------------------------------- | ---------------- |
| Surrogate | -min(r A, clip(r) A), in `flowrl.losses.ratio`            | arXiv:1707.06347 |
| GPPO      | the same, but clipped entries keep their gradient | arXiv:2508.07629 |
| CISPO     | -stop(clip(r)) A log p                              | arXiv:2506.13585 |
| SAPO      | -A sigmoid(tau (r - 1)) 4 / tau: a soft clip        | arXiv:2511.20347 |
| VESPO     | -stop(phi(w)) A log p, w the ratio of the whole row | arXiv:2602.10693 |
| GMPO      | -A times the geometric mean of clipped ratios       | arXiv:2507.20673 |
| Reinforce | -A log p                                            | Williams, 1992   |

GSPO is `Surrogate` with `Token(ratio="sequence")`; DAPO, Dr. GRPO and LUSPO are `Surrogate` with
their denominators.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.likelihoods.rows import Evaluations, Rows
from flowrl.likelihoods.token_ratios import row_mean, row_sum
from flowrl.losses.base import Denominator, PolicyTerm, RatioLoss
from flowrl.losses.weights import Correction

_LOWEST, _HIGHEST = math.log(1e-8), 20.0  # VESPO's bounds on a row's log-ratio
_TOKEN_BOUND = 20.0  # and on a token's


@dataclass(frozen=True)
class CISPO(RatioLoss):
    """Policy gradient with a bounded weight per token: CISPO (arXiv:2506.13585).

        loss = -stop(clip(r, low, high)) A log p

    No token loses its gradient. `low` and `high` bound the ratio itself, not its distance from 1.
    ScaleRL (arXiv:2510.13786) uses 5 for `high`; a value below 1 would scale down every gradient.

    high  largest weight of a token's ratio, above `low`
    low   smallest weight of a token's ratio, at least 0
    """

    homogeneous = True
    high: float = 5.0
    low: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.low < self.high < math.inf:
            raise UserError(f"CISPO's bounds ({self.low}, {self.high}): 0 <= low < high")

    def policy(self, log_ratio: Tensor, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        ratio = log_ratio.detach().exp()
        value = -ratio.clamp(self.low, self.high) * rows.advantage * evaluations["new"].logp
        return value, {"clipped_high": ((ratio > self.high) & (rows.advantage > 0)).to(ratio)}


@dataclass(frozen=True)
class SAPO(RatioLoss):
    """A soft clip whose slope is 1 at r = 1 and decays away from it: SAPO (arXiv:2511.20347).

        loss = -A sigmoid(tau (r - 1)) 4 / tau

    tau is `positive` for A > 0 and `negative` otherwise; the paper's values are for ratios of
    tokens. Ratios of denoising steps move far less: there tau should be about 1 / (the usual clip
    range).

    positive  temperature of good samples' ratios, above 0; larger decays faster away from 1
    negative  temperature of bad samples' ratios, above 0; larger decays faster away from 1
    """

    homogeneous = True
    positive: float = 1.0
    negative: float = 1.05
    denominator: Denominator = field(default="rows", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.positive < math.inf or not 0 < self.negative < math.inf:
            raise UserError(
                f"SAPO's temperatures ({self.positive}, {self.negative}) must be above 0"
            )

    def policy(self, log_ratio: Tensor, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        tau = torch.where(rows.advantage > 0, self.positive, self.negative)
        gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
        return -gate * rows.advantage, {"gate": (gate * tau / 2).detach()}  # 1 at r = 1


@dataclass(frozen=True)
class VESPO(RatioLoss):
    """Policy gradient weighted by a smooth function of the row's ratio: VESPO (arXiv:2602.10693).

        loss = -stop(phi(w)) A log p,  phi(w) = w^k exp(lambda (1 - w))

    w is the ratio of the whole row (a product, whatever the likelihood's level), times the row's
    `mismatch` with another engine. `positive` and `negative` are (k, lambda) by the sign of A. A
    mismatch in mode "mask" removes the whole row of a masked token: truncate instead.

    positive  [k, lambda] of good samples
    negative  [k, lambda] of bad samples
    mismatch  correction for another sampling engine, {level: ..., mode: truncate, ...}; null: none
    """

    homogeneous = True
    of_tokens = True
    positive: tuple[float, float] = (2.0, 3.0)
    negative: tuple[float, float] = (3.0, 2.0)
    mismatch: Correction | None = None

    def policy(self, log_ratio: Tensor, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        new, old = evaluations["new"].logp, evaluations["old"].logp
        log_ratios = (new.detach() - old).clamp(-_TOKEN_BOUND, _TOKEN_BOUND)
        total = row_sum(log_ratios, rows.mask)
        if self.mismatch is not None:
            factor = self.mismatch.factor(evaluations, rows)
            total = total + factor.log().clamp(_LOWEST, _TOKEN_BOUND).sum(1, keepdim=True)
        log_w = total.clamp(_LOWEST, _HIGHEST)
        good = rows.advantage >= 0
        k, rate = (
            torch.where(good, a, b) for a, b in zip(self.positive, self.negative, strict=True)
        )
        phi = (rate * (1 - log_w.exp()) + k * log_w).exp()
        return -phi * rows.advantage * new, {"phi": phi}


@dataclass(frozen=True)
class GMPO(RatioLoss):
    """Geometric mean of a row's clipped ratios: GMPO (arXiv:2507.20673).

        loss = -A exp(mean_t log r_t),  log r_t <= high for A > 0, log r_t >= -low otherwise

    Reads the tokens' own log-ratios, whatever the likelihood's level.

    low   how far the log-ratio of a bad sample's token may fall below 0, above 0
    high  how far that of a good sample's token may rise above 0, above 0
    """

    homogeneous = True
    of_tokens = True
    low: float = 0.4
    high: float = 0.4
    denominator: Denominator = field(default="rows", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.low < math.inf or not 0 < self.high < math.inf:
            raise UserError(f"GMPO's range ({self.low}, {self.high}) of log-ratios must be above 0")

    def policy(self, log_ratio: Tensor, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        log_ratios = evaluations["new"].logp - evaluations["old"].logp
        good, bad = rows.advantage > 0, rows.advantage < 0
        clipped = torch.where(
            good, log_ratios.clamp(max=self.high), log_ratios.clamp(min=-self.low)
        )
        value = -row_mean(clipped, rows.mask).exp() * rows.advantage
        counts = {
            "clipped_low": (bad & (log_ratios < -self.low)).to(log_ratios),
            "clipped_high": (good & (log_ratios > self.high)).to(log_ratios),
        }
        return value, counts


@dataclass(frozen=True)
class Reinforce(RatioLoss):
    """The plain policy gradient: REINFORCE (Williams, 1992).

        loss = -A log p

    For one update per iteration: samples of an older policy are not corrected for.
    """

    homogeneous = True
    of_tokens = True

    def policy(self, log_ratio: Tensor, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        return -rows.advantage * evaluations["new"].logp, {}
