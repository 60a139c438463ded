"""Advantages that keep a signal where a whole group does well or badly."""

import math
from dataclasses import dataclass, field

from flowrl.credit.advantages import Standardize
from flowrl.credit.choices import Choices
from flowrl.credit.fitting import refuse_branches, refuse_untracked
from flowrl.credit.turns import Baseline
from flowrl.credit.values import Context, Credit
from flowrl.errors import UserError


@dataclass(frozen=True)
class Augmented:
    """Advantages plus a clipped difference from a baseline: AAPO (arXiv:2505.14264).

        A = rule(value) + clip(value - baseline, -low, high)

    A tracker sets the baseline of each draw. The paper's baseline is the score of a reference
    model's sample, which its released trainers do not compute.

    rule  the first summand: settings of `standardize`
    low   how far the difference may fall, at least 0
    high  how far it may rise, at least 0
    """

    rule: Standardize = field(default_factory=Standardize)
    low: float = 0.2
    high: float = 0.28

    def __post_init__(self) -> None:
        if not (0 <= self.low < math.inf and 0 <= self.high < math.inf):
            raise UserError(
                f"the clip bounds low and high must be at least 0, got {self.low} and {self.high}"
            )

    def __call__(self, credit: Credit, context: Context) -> Credit:
        lead = Baseline()(credit, context).value.clamp(-self.low, self.high)
        return credit._replace(value=(self.rule(credit, context).value + lead) * credit.mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices) or refuse_untracked(self, choices)
