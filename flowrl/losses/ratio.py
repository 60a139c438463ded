"""Losses: pure functions of policies' evaluations. No model is called in this file.

`new` is the policy being trained, `old` the sampling policy, `ref` the frozen initial policy; other
roles are named averages. The base class is in `flowrl/losses/base.py`; ratio losses from the
language-model literature are in `flowrl/losses/token.py`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flowrl.credit.choices import Choices
from flowrl.credit.comparisons import BestWorst, Exponential
from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.rows import Evaluations, MatchingRows, Rows
from flowrl.likelihoods.transition import Likelihood, entries, mse
from flowrl.losses.base import (
    Anchor,
    Derived,
    Entries,
    PolicyTerm,
    RatioLoss,
    anchored,
    past_high,
    past_low,
    roles,
)
from samplers.kernels import per_row

_LARGE = 80.0  # e^80 is finite in float32; an infinite slope times a clip's 0 is NaN


def clipped_surrogate(
    log_ratio: Float[Tensor, "b t"],
    advantage: Float[Tensor, "b t"],
    low: float,
    high: float,
    dual: float | None = None,
) -> Float[Tensor, "b t"]:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), per entry.

        -min(r A, clip(r, 1 - low, 1 + high) A)

    `dual` bounds the loss of bad samples at -dual A: dual clip (arXiv:1912.09729).
    """
    # beyond _LARGE good samples are clipped, and exp's slope may be inf
    ratio = torch.where(advantage > 0, log_ratio.clamp(max=_LARGE), log_ratio).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is not None:
        gain = torch.where(advantage < 0, torch.maximum(gain, dual * advantage), gain)
    return -gain


@dataclass(frozen=True)
class Surrogate(RatioLoss):
    """PPO's clipped surrogate (arXiv:1707.06347) with separate lower and upper bounds.

        loss = -min(r A, clip(r, 1 - low, 1 + high) A)

    `high > low` is DAPO's clip-higher (arXiv:2503.14476). `dual` bounds the ratio of bad samples:
    dual clip (arXiv:1912.09729), or INTELLECT-2's two-sided delta (arXiv:2505.07291). Metrics count
    a clip only where it acts: a ratio below 1 - low with A < 0, or above 1 + high with A > 0.
    """

    homogeneous = True
    low: float
    high: float
    dual: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.low <= 1 or self.high <= 0:
            raise UserError(
                f"clip range ({self.low}, {self.high}): low must be in (0, 1] and high above 0"
            )
        if self.dual is not None and self.dual <= 1 + self.high:
            raise UserError(
                f"dual clip {self.dual} must be above 1 + high = {1 + self.high}; 3 is a common "
                "value"
            )

    @property
    def clip(self) -> tuple[float, float]:
        return self.low, self.high

    def policy(self, log_ratio: Tensor, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        value = clipped_surrogate(log_ratio, rows.advantage, self.low, self.high, self.dual)
        return value, clip_counts(log_ratio, rows.advantage, self.low, self.high, self.dual)


def clip_counts(
    log_ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None
) -> dict[str, Derived]:
    """Mask of the entries [b t] whose gradient the clip removes, for each side."""
    given = (log_ratio.detach(), advantage)

    def below(log_ratio: Tensor, advantage: Tensor) -> Tensor:
        return past_low(log_ratio.exp(), advantage, low)

    def above(log_ratio: Tensor, advantage: Tensor) -> Tensor:
        return past_high(log_ratio.exp(), advantage, high)

    def bounded(log_ratio: Tensor, advantage: Tensor) -> Tensor:
        return (advantage < 0) & (log_ratio.exp() > (dual or math.inf))

    counts = {"clipped_low": Derived(below, given), "clipped_high": Derived(above, given)}
    return counts if dual is None else counts | {"clipped_dual": Derived(bounded, given)}


@dataclass(frozen=True)
class Preference:
    """Preference for the better sample of each pair: DPO (arXiv:2305.18290).

        loss = -log sigmoid(beta (gain_better - gain_worse)),  gain = log p_new - log p_ref

    Rows come in pairs, the better first. With `Matching` this is Diffusion-DPO (arXiv:2311.12908),
    whose beta is twice this one.
    """

    unit = 2
    roles = frozenset({"ref"})
    beta: float

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise UserError(f"Preference's beta must be above 0, got {self.beta}")

    def refuses(self, choices: Choices) -> str | None:
        """Refuses rows that are not pairs of a group's best and worst samples."""
        if not any(isinstance(each, BestWorst) for each in choices.transforms[-1:]):
            return "Preference needs BestWorst as the last transform of the advantage"
        return None

    def __call__(self, likelihood: Likelihood, evaluations: Evaluations, rows: Rows) -> Entries:
        each = evaluations["new"].logp - evaluations["ref"].logp
        better, worse = (each * rows.mask).sum(1).view(-1, 2).unbind(1)
        margin = (self.beta * (better - worse)).repeat_interleave(2)[:, None].expand_as(each)
        metrics = {"margin": margin.detach(), "won": (margin > 0).to(margin)}
        return Entries(-F.logsigmoid(margin), "rows", metrics)  # both rows carry their pair's loss


@dataclass(frozen=True)
class Weighted:
    """Weighted likelihood, with advantages as non-negative weights.

        loss = -w log p_new

    With `Exponential` weights this is reward-weighted regression (ORW-CFM-W2, arXiv:2502.06061,
    with an anchor to "ref" for its W2 term); with equal weights, fine-tuning on the policy's own
    samples.
    """

    homogeneous = True
    unit = 1
    anchors: tuple[Anchor, ...] = ()

    @property
    def roles(self) -> frozenset[str]:
        return roles(self.anchors)

    def refuses(self, choices: Choices) -> str | None:
        """Refuses weights that can be negative."""
        if not any(isinstance(each, Exponential) for each in choices.transforms[-1:]):
            return "Weighted needs weights of at least 0: make Exponential the last transform"
        return None

    def __call__(self, likelihood: Likelihood, evaluations: Evaluations, rows: Rows) -> Entries:
        divergence, metrics = anchored(self.anchors, likelihood, evaluations, rows)
        value = -rows.advantage * evaluations["new"].logp
        own = {"logp": evaluations["new"].logp.detach(), "policy_loss": value.detach()}
        return Entries(value + divergence, "tokens", {**own, **metrics})


@dataclass(frozen=True)
class NFT:
    """Regression towards good samples and away from bad ones: DiffusionNFT (arXiv:2509.16117).

        loss = (r |x0_good - x0|^2 + (1 - r) |x0_bad - x0|^2) advantage_max / beta

    v_good = (1 - beta) v_old + beta v and v_bad = (1 + beta) v_old - beta v predict x0_good and
    x0_bad (x0 = x - sigma v); each squared error is divided by its detached mean size.
    r = 1/2 + A / (2 advantage_max), with A clipped to +-advantage_max and then mapped by `mode`.

    mode  all | positive_only (A < 0 is 0) | negative_only (A > 0 is 0) | one_only (A > 0 is 1, all
          others 0) | binary (the sign of A)
    """

    unit = 1
    beta: float = 1.0
    advantage_max: float = 5.0
    mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    anchors: tuple[Anchor, ...] = ()

    def __post_init__(self) -> None:
        if self.beta <= 0 or self.advantage_max <= 0:
            raise UserError(
                f"NFT needs beta and advantage_max above 0, not {self.beta} and "
                f"{self.advantage_max}"
            )

    @property
    def roles(self) -> frozenset[str]:
        return roles(self.anchors, "old")

    def refuses(self, choices: Choices) -> str | None:
        """Refuses likelihoods without velocities, and sampling with the current policy."""
        if not isinstance(choices.likelihood, Matching):
            return "NFT compares velocities: use the Matching likelihood"
        if choices.behaviour == "current":
            return (
                "NFT needs a slower policy for sampling: add an average, such as "
                "Average('trailing', Decay(slope=0.001, most=0.5)), and name it as behaviour"
            )
        return None

    def __call__(self, likelihood: Likelihood, evaluations: Evaluations, rows: Rows) -> Entries:
        v, old = evaluations["new"].out, evaluations["old"].out
        assert isinstance(rows, MatchingRows) and v is not None and old is not None
        old = old.detach()
        good = (0.5 + self._read(rows.advantage) / (2 * self.advantage_max)).clamp(0, 1)
        error_good = _x0_error((1 - self.beta) * old + self.beta * v, rows)
        error_bad = _x0_error((1 + self.beta) * old - self.beta * v, rows)
        value = (good * error_good + (1 - good) * error_bad) * self.advantage_max / self.beta
        divergence, metrics = anchored(self.anchors, likelihood, evaluations, rows)
        moved = mse(v.detach(), old, layout=rows.layout)
        own = {"moved": moved, "policy_loss": value.detach()}
        return Entries(value + divergence, "tokens", {**own, **metrics})

    def _read(self, advantage: Tensor) -> Tensor:
        a = advantage.clamp(-self.advantage_max, self.advantage_max)
        if self.mode == "positive_only":
            return a.clamp(min=0)
        if self.mode == "negative_only":
            return a.clamp(max=0)
        if self.mode == "one_only":
            return (a > 0).to(a)
        return a.sign() if self.mode == "binary" else a


def _x0_error(v: Float[Tensor, "b *d"], rows: MatchingRows) -> Float[Tensor, "b t"]:
    """Squared error of the clean sample that v predicts, over its detached mean size; of each part,
    if the parts are entries of their own."""
    error = rows.x - per_row(rows.sigma, v) * v - rows.x0
    size = entries(error.detach().abs(), None, rows.layout).clamp(min=1e-5)
    return entries(error.square(), None, rows.layout) / size
