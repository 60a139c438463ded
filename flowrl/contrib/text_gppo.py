"""GPPO: clipped tokens keep a bounded gradient."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.likelihoods.rows import Evaluations, Rows
from flowrl.losses.base import PolicyTerm, RatioLoss
from flowrl.losses.ratio import clip_counts
from flowrl.number_checks import check_number
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.text import GROUP, sampling_settings, texts
from samplers.number_ranges import FROM_0_TO_1


@dataclass(frozen=True)
class GPPO(RatioLoss):
    """Clipped surrogate whose clipped entries keep the gradient at the bound: GPPO.

        loss = -min(r A, k A),  k = clip(r) (1 + keep (r / stop(r) - 1)) where r is clipped

    arXiv:2508.07629. `keep_low` and `keep_high` are the fractions of the gradient that are kept for
    bad samples below 1 - low and good ones above 1 + high; with both 0 it is the `Surrogate`. The
    authors later advise 0.25 to 0.5, or only the high side, where entropy collapses.
    """

    homogeneous = True
    low: float = 0.2
    high: float = 0.2
    keep_low: float = 1.0
    keep_high: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.low <= 1 or not 0 < self.high < math.inf:
            raise UserError(
                f"GPPO's range ({self.low}, {self.high}): low must be in (0, 1], high above 0"
            )
        check_number("GPPO's keep_low", self.keep_low, FROM_0_TO_1)
        check_number("GPPO's keep_high", self.keep_high, FROM_0_TO_1)

    @property
    def clip(self) -> tuple[float, float]:
        return self.low, self.high

    def policy(self, log_ratio: Tensor, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        ratio = log_ratio.exp()
        still = ratio / ratio.detach()  # 1, with the gradient of log p
        floor = (1 - self.low) * (1 + self.keep_low * (still - 1))
        ceiling = (1 + self.high) * (1 + self.keep_high * (still - 1))
        clipped = torch.where(ratio < 1 - self.low, floor, ratio)
        clipped = torch.where(ratio > 1 + self.high, ceiling, clipped)
        value = -torch.minimum(ratio * rows.advantage, clipped * rows.advantage)
        return value, clip_counts(log_ratio, rows.advantage, self.low, self.high)


@rests_on("paper")
@sampling_settings()
def text_gppo(
    *, length: int = 4096, group: int = 8, low: float = 0.2, high: float = 0.28,
    keep_low: float = 1.0, keep_high: float = 1.0,
) -> Algorithm:  # fmt: skip
    """GPPO of Klear-Reasoner, arXiv:2508.07629: clipped tokens keep a bounded gradient. The authors
    later advise 0.25 to 0.5, or only the high side, where entropy collapses.

    keep_low   share of the gradient that bad tokens below 1 - low keep, in [0, 1]; 0 is PPO's clip
    keep_high  share of the gradient that good tokens over 1 + high keep, in [0, 1]; 0 is PPO's clip
    """
    return texts(length, group, (GROUP,), GPPO(low, high, keep_low, keep_high))
