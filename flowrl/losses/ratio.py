"""PPO's clipped surrogate, and the counts of the entries that a clip removes.

The base class is in `flowrl/losses/base.py`; ratio losses from the language-model literature are in
`flowrl/losses/token.py`.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import UserError
from flowrl.likelihoods.rows import Evaluations, Rows
from flowrl.losses.base import Derived, PolicyTerm, RatioLoss, past_high, past_low

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

    low   clip range of the ratio below 1, in (0, 1]: under 1 - low, bad samples have no gradient
    high  clip range of the ratio over 1, above 0: beyond 1 + high, good samples have no gradient
    dual  largest ratio of a bad sample, above 1 + high; null: no bound
    """

    homogeneous = True
    low: float
    high: float
    dual: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.low <= 1 or not 0 < self.high < math.inf:
            raise UserError(
                f"clip range ({self.low}, {self.high}): low must be in (0, 1] and high above 0"
            )
        if self.dual is not None and not 1 + self.high < self.dual < math.inf:
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
    read = (log_ratio.detach(), advantage)

    def below(log_ratio: Tensor, advantage: Tensor) -> Tensor:
        return past_low(log_ratio.exp(), advantage, low)

    def above(log_ratio: Tensor, advantage: Tensor) -> Tensor:
        return past_high(log_ratio.exp(), advantage, high)

    def bounded(log_ratio: Tensor, advantage: Tensor) -> Tensor:
        return (advantage < 0) & (log_ratio.exp() > (dual or math.inf))

    counts = {"clipped_low": Derived(below, read), "clipped_high": Derived(above, read)}
    return counts if dual is None else counts | {"clipped_dual": Derived(bounded, read)}
