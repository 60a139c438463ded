"""Factors on the policy term of tokens: importance correction, off-policy masks, entropy filters.

Each is a `Weight` of a loss (`weights=`). None changes a denominator or an anchor.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import UserError
from flowrl.likelihoods.rows import (
    BEHAVIOUR,
    ENGINE,
    Evaluation,
    Evaluations,
    Rows,
    TokenRows,
    TransitionRows,
)
from flowrl.likelihoods.token_ratios import bounded, mismatch, row_mean
from flowrl.likelihoods.transition import Likelihood, Transition
from flowrl.losses.base import PolicyTerm, entropies, past_high, past_low
from flowrl.number_checks import check_number
from flowrl.table import Column
from samplers.host import wide
from samplers.number_ranges import AT_LEAST_0

BoundMode = Literal["truncate", "mask", "none"]
UNCERTAIN: Column[Tensor] = Column("the most uncertain tokens", "uncertain", "row")
"""[b t] bool: tokens of highest entropy in the iteration."""


def sampled(rows: Rows, old: Evaluation) -> Tensor:
    """Log-probabilities under the engine that sampled: another engine, or the trainer itself."""
    assert isinstance(rows, TokenRows), "only token rows can come from another engine"
    return old.logp if rows.sampled is None else rows.sampled


@runtime_checkable
class Correction(Protocol):
    """A weight per token [b t] or per row [b 1] that corrects for another sampling engine."""

    def factor(self, evaluations: Evaluations, rows: Rows) -> Tensor: ...


@dataclass(frozen=True)
class Mismatch:
    """Importance weights for samples of another engine: truncated importance sampling.

        weight = clip(p_old / p_sampled, low, high)

    level  the ratio of a token, or its product over the row
    mode   "truncate" clips to low..high; "mask" is 0 outside; "none" is 1 and only records the
           metrics

    Metrics: `mismatch`, the mean |log p_old - log p_sampled| per token (and `mismatch_max`), the
    mean `mismatch_weight`, the shares of truncated and masked tokens `mismatch_truncated` and
    `mismatch_masked`, and `mismatch_effective`: (sum w)^2 / (n sum w^2) over the n tokens of one
    call.

    high  largest weight, above 1
    low   smallest weight, in [0, 1)
    """

    level: Literal["token", "sequence"] = "sequence"
    mode: BoundMode = "mask"
    high: float = 3.0
    low: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < 1 < self.high < math.inf:
            raise UserError(f"Mismatch's bounds ({self.low}, {self.high}): 0 <= low < 1 < high")

    def factor(self, evaluations: Evaluations, rows: Rows) -> Tensor:
        """Correction factors [b t], or [b 1] for the sequence level."""
        return self._weight(self._ratio(evaluations, rows))

    def _ratio(self, evaluations: Evaluations, rows: Rows) -> Tensor:
        old = evaluations["old"]
        return mismatch(old.logp, sampled(rows, old), rows.mask, self.level)

    def _weight(self, ratio: Tensor) -> Tensor:
        if self.mode == "none":
            return torch.ones_like(ratio)
        return bounded(ratio, self.mode, self.low, self.high)

    def __call__(self, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        old = evaluations["old"]
        ratio = self._ratio(evaluations, rows).expand_as(old.logp)
        weight = self._weight(ratio)
        difference = (old.logp - sampled(rows, old)).abs().nan_to_num(0.0)
        return weight, mismatch_metrics(self, ratio, weight, difference, rows)


@runtime_checkable
class BoundedRatio(Protocol):
    """A weight that bounds a ratio."""

    @property
    def mode(self) -> BoundMode: ...

    @property
    def high(self) -> float: ...

    @property
    def low(self) -> float: ...


def mismatch_metrics(
    how: BoundedRatio, ratio: Tensor, weight: Tensor, difference: Tensor, rows: Rows
) -> dict[str, Tensor]:
    """Metrics of a correction, per entry [b t]: see `Mismatch`."""
    outside = ((ratio < how.low) | (ratio > how.high)).to(ratio)
    none, unmasked = torch.zeros_like(outside), wide(weight[rows.mask])
    effective = unmasked.sum() ** 2 / (len(unmasked) * unmasked.square().sum()).clamp(min=1e-12)
    return {
        "mismatch": difference,
        "mismatch_weight": weight,
        "mismatch_truncated": outside if how.mode == "truncate" else none,
        "mismatch_masked": outside if how.mode == "mask" else none,
        "mismatch_effective": effective.to(ratio).expand_as(ratio),
    }


@dataclass(frozen=True)
class StepMismatch:
    """Importance weights for denoising steps that an engine took: `Mismatch` for images.

        weight = clip(p_old / p_engine, low, high)

    The ratio is that of the mean log-density over a state's dimensions, as in the loss's own ratio.
    Rows without the column ENGINE have weight 1. Metrics are those of `Mismatch`.

    likelihood  whose ratio it is: `transition` with its settings
    mode        `truncate` clips to low..high; `mask` is 0 outside; `none` is 1 and records metrics
    high        largest weight, any number above `low`; meant to be above 1
    low         smallest weight, any number below `high`; meant to be in [0, 1)
    """

    likelihood: Transition
    mode: BoundMode = "mask"
    high: float = 3.0
    low: float = 0.0

    @property
    def reads(self) -> tuple[Column[Any], ...]:
        return (ENGINE,)

    def __call__(self, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        old = evaluations["old"]
        if ENGINE not in rows.table:
            return torch.ones_like(old.logp), {}
        assert isinstance(rows, TransitionRows), "engines take denoising steps"
        plain = replace(self.likelihood, ratio="density")
        log_ratio = plain.log_ratio(old, rows.table[ENGINE], rows).detach()
        ratio = log_ratio.exp()
        weight = torch.ones_like(ratio)
        if self.mode != "none":
            weight = bounded(ratio, self.mode, self.low, self.high)
        return weight, mismatch_metrics(self, ratio, weight, log_ratio.abs(), rows)


@dataclass(frozen=True)
class Decoupled:
    """The ratio of the proximal policy to the one that sampled, for denoising steps: the decoupled
    objective of PPO (arXiv:2110.00641, eq. 6), for samples of older weights.

        weight = clip(r(old, behaviour), low, high)

    r is the exponential of the likelihood's own log-ratio, and `old` the policy at the centre of
    the clip range, whose weights the update starts from. `mode` as in `Mismatch`; rows without
    the column BEHAVIOUR were sampled by `old` and have weight 1.

    Metrics: `behind`, the mean |log r|; `behind_weight`; `behind_outside`, the share outside
    low..high.

    likelihood  whose ratio it is: a part, such as `transition`
    mode        `truncate` clips to low..high; `mask` is 0 outside; `none` is 1 and records metrics
    high        largest weight, any number above `low`; meant to be above 1
    low         smallest weight, any number below `high`; meant to be in [0, 1)
    """

    reads: ClassVar[tuple[Column[Any], ...]] = (BEHAVIOUR,)
    likelihood: Likelihood
    mode: Literal["truncate", "mask", "none"] = "mask"
    high: float = 3.0
    low: float = 0.0

    def __call__(self, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        old = evaluations["old"]
        if BEHAVIOUR not in rows.table:
            return torch.ones_like(old.logp), {}
        log_ratio = self.likelihood.log_ratio(old, rows.table[BEHAVIOUR], rows).detach()
        ratio = log_ratio.exp()
        outside = ((ratio < self.low) | (ratio > self.high)).to(ratio)
        weight = torch.ones_like(ratio)
        if self.mode != "none":
            weight = bounded(ratio, self.mode, self.low, self.high)
        return weight, {
            "behind": log_ratio.abs(),
            "behind_weight": weight,
            "behind_outside": outside,
        }


@dataclass(frozen=True)
class BehindClip:
    """Leaves out rows that the policy has already moved past the loss's clip range since they were
    sampled, in the direction of their advantage: PPO's clip (arXiv:1707.06347, eq. 7) around the
    policy that sampled, decided at the proximal policy.

        weight = 0 if A < 0 and r < 1 - low, or A > 0 and r > 1 + high, else 1

    with r = r(old, behaviour).

    The decoupled objective clips around `old` alone, so that an update of one step has no clip at
    all, and `Decoupled`'s bounds hardly act on denoising steps, whose log-ratio is a mean over
    dimensions: samples of several versions then push the same way again and again.

    Metric: `behind_clipped`, the share of these rows.

    likelihood  whose ratio it is: a part, such as `transition`
    low         the loss's clip range of the ratio below 1, any number; meant to be its `low`
    high        the loss's clip range of the ratio over 1, any number; meant to be its `high`
    """

    reads: ClassVar[tuple[Column[Any], ...]] = (BEHAVIOUR,)
    likelihood: Likelihood
    low: float
    high: float

    def __call__(self, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        old = evaluations["old"]
        if isinstance(rows, TokenRows) and rows.sampled is not None:
            behaviour = Evaluation(rows.sampled, None)
        elif BEHAVIOUR in rows.table:
            behaviour = rows.table[BEHAVIOUR]
        else:
            return torch.ones_like(old.logp), {}
        ratio = self.likelihood.log_ratio(old, behaviour, rows).detach().exp()
        below = past_low(ratio, rows.advantage, self.low)
        clipped = (below | past_high(ratio, rows.advantage, self.high)).to(ratio)
        return 1 - clipped, {"behind_clipped": clipped}


@dataclass(frozen=True)
class OffPolicyMask:
    """Masks bad samples that the policy has moved away from: DeepSeek-V3.2 (arXiv:2512.02556).

    weight = 0 if A < 0 and mean_t (log p_sampled - log p_new) > threshold else 1

    threshold  mean fall of a token's log-probability, in nats, beyond which a bad sample is masked,
               above 0
    """

    threshold: float

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf:
            raise UserError(
                f"the threshold of an off-policy mask must be above 0, not {self.threshold}"
            )

    def __call__(self, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        fall = sampled(rows, evaluations["old"]) - evaluations["new"].logp.detach()
        near = row_mean(fall.nan_to_num(0.0), rows.mask) <= self.threshold
        factor = ((rows.advantage >= 0) | near).to(rows.advantage)
        return factor, {"off_policy": 1 - factor}


def share_bound(values: Float[Tensor, " n"], share: float) -> float:
    """The (1 - share) quantile: the highest `share` of the values (at least one) reach it. Needs at
    least one value."""
    rank = int(share * (len(values) - 1) + 1e-9)  # a share of .29 of 100 is .29 * 100 = 28.99...
    return float(values.sort(descending=True).values[rank])


@dataclass(frozen=True)
class HighEntropy:
    """Trains only on tokens where the policy was least certain (arXiv:2506.01939).

        weight = 1 if H >= bound else 0

    share  in (0, 1]: `bound` is the (1 - share) quantile of the entropies H of the iteration's
           tokens in the loss, under the policy that sampled them: the update marks these tokens in
           the column UNCERTAIN. Rows without marks are treated as the whole iteration
    floor  at least 0: `bound` is this many nats, and H is the entropy of the policy being trained
    """

    share: float | None = None
    floor: float | None = None

    @property
    def reads(self) -> tuple[Column[Any], ...]:
        return () if self.share is None else (UNCERTAIN,)

    def __post_init__(self) -> None:
        if (self.share is None) == (self.floor is None):
            raise UserError("HighEntropy needs either a share or a floor")
        if self.share is not None and not 0 < self.share <= 1:
            raise UserError(f"HighEntropy's share must be in (0, 1], got {self.share}")
        check_number("HighEntropy's floor", self.floor, AT_LEAST_0)

    def __call__(self, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        entropy = entropies(evaluations["new"]).detach()
        chosen = self._chosen(entropy, rows)
        factor = (chosen & rows.mask).to(entropy)
        return factor, {"uncertain": factor}

    def _chosen(self, entropy: Tensor, rows: Rows) -> Tensor:
        if self.floor is not None:
            return entropy >= self.floor
        assert self.share is not None and isinstance(rows, TokenRows)
        if UNCERTAIN in rows.table:
            return rows.table[UNCERTAIN]
        unmasked = entropy[rows.mask]
        return entropy >= (share_bound(unmasked, self.share) if len(unmasked) else math.inf)
