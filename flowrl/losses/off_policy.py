"""Losses on samples of any policy: the REC family (arXiv:2509.24203), and A*-PO's regression."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.credit.choices import Choices
from flowrl.errors import UserError
from flowrl.likelihoods.rows import Evaluations, Rows
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.transition import Likelihood
from flowrl.losses.base import Entries, PolicyTerm, RatioLoss, past_high, past_low


@dataclass(frozen=True)
class REC(RatioLoss):
    """Group-relative REINFORCE on samples of any age: the REC family (arXiv:2509.24203).

        loss = -A w log p kept + pull log(r)^2,  kept and w without gradient, r = p / p_old

    keep    one_side  r <= 1 + high where A >= 0, r >= 1 - low where A <= 0: REC-OneSide
            two_side  1 - low <= r <= 1 + high
            ring      two_side, and also r far on the other side: r <= 1 - far_low where A >= 0,
                      r >= 1 + far_high where A <= 0
            all       every entry: OPMD with a `pull` (Kimi k1.5, arXiv:2501.12599, whose tau / 2
                      it is), AsymRE (arXiv:2506.20520) with a shift of `GroupBaseline`
    factor  w is 1 (none), r (ratio: importance sampling) or exp(A / temperature) (advantage)

    The ratio has the likelihood's level: with `ratio: sequence` whole completions are kept or not.
    It replaces the gradient of log p, so the loss also fits denoising steps, whose ratios need
    `low` and `high` of about 1e-4.

    low          how far the ratio may fall under 1, above 0 and at most `far_low`
    high         how far it may rise over 1, above 0 and at most `far_high`
    far_low      distance under 1 at which `ring` keeps entries again, above 0, up to 1
    far_high     distance over 1 at which `ring` keeps entries again, above 0
    temperature  of exp(A / temperature) with `factor: advantage`, in units of the advantage, above
                 0
    pull         weight of the squared log-ratio, at least 0; larger keeps the policy nearer to the
                 sampling one
    """

    keep: Literal["one_side", "two_side", "ring", "all"] = "one_side"
    low: float = 0.2
    high: float = 0.2
    far_low: float = 0.6
    far_high: float = 2.0
    factor: Literal["none", "ratio", "advantage"] = "none"
    temperature: float = 1.0
    pull: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 < self.low <= self.far_low <= 1 and 0 < self.high <= self.far_high < math.inf):
            raise UserError(
                f"REC's range ({self.low}, {self.high}) and far range ({self.far_low}, "
                f"{self.far_high}): 0 < low <= far_low <= 1 and 0 < high <= far_high"
            )
        if not 0 < self.temperature < math.inf or not 0 <= self.pull < math.inf:
            raise UserError(
                f"REC's temperature {self.temperature} must be above 0, its pull {self.pull} at "
                "least 0"
            )

    @property
    def homogeneous(self) -> bool:
        return self.factor != "advantage" and self.pull == 0

    def policy(self, log_ratio: Tensor, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        ratio, a = log_ratio.detach().exp(), rows.advantage
        trained = self._kept(ratio, a)
        weight = trained.to(a)
        if self.factor == "ratio":
            weight = torch.where(trained, ratio, 0.0)
        elif self.factor == "advantage":
            weight = weight * (a / self.temperature).exp()
        value = -a * weight * log_ratio + self.pull * log_ratio.square()
        return value, {"left_out": (~trained).to(a)}

    def _kept(self, ratio: Tensor, a: Tensor) -> Tensor:
        """Entries [b t] that are trained on."""
        if self.keep == "all":
            return torch.ones_like(a, dtype=torch.bool)
        if self.keep == "one_side":
            return ~(past_low(ratio, a, self.low) | past_high(ratio, a, self.high))
        within = (ratio >= 1 - self.low) & (ratio <= 1 + self.high)
        if self.keep == "two_side":
            return within
        back = ((a >= 0) & (ratio <= 1 - self.far_low)) | ((a <= 0) & (ratio >= 1 + self.far_high))
        return within | back


@dataclass(frozen=True)
class AdvantageRegression:
    """Regression of the log-ratio to the initial policy on the advantage: A*-PO (arXiv:2505.20686).

        loss = (beta log(p_new / p_ref) - A)^2

    For A = r - V* it is 0 at the optimal policy with a KL penalty of weight beta, for samples of
    any policy. The ratio is that of the whole completion, and all rows have the same weight.

    beta  weight of the divergence from the initial policy, in units of the reward, above 0; larger
          keeps the policy nearer to it
    """

    unit = 1
    beta: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise UserError(f"AdvantageRegression's beta must be above 0, got {self.beta}")

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"ref"})

    def refuses(self, choices: Choices) -> str | None:
        """Refuses ratios that cover only part of a sample."""
        likelihood = choices.likelihood
        if not isinstance(likelihood, Token) or likelihood.ratio != "product":
            return (
                "AdvantageRegression reads the ratio of whole completions: set likelihood: "
                "{ratio: product}, of texts"
            )
        return None

    def __call__(self, likelihood: Likelihood, evaluations: Evaluations, rows: Rows) -> Entries:
        moved = self.beta * likelihood.log_ratio(evaluations["new"], evaluations["ref"], rows)
        value = (moved - rows.advantage).square()
        metrics = {"implicit_reward": moved.detach(), "policy_loss": value.detach()}
        return Entries(value, "rows", metrics)
