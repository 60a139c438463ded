"""RiskPO: scores of bundles of prompts, credited by their place between two quantiles."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.algorithm import Algorithm
from flowrl.credit.choices import Choices
from flowrl.credit.fitting import refuse_branches
from flowrl.credit.values import (
    NONE,
    Context,
    Credit,
    by_column,
    masked_std,
)
from flowrl.errors import UserError
from flowrl.losses.ratio import Surrogate
from flowrl.number_checks import check_number
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.text import OVER_BATCH, sampling_settings, texts
from flowrl.table import Column
from rewards.types import Scores
from samplers.number_ranges import ABOVE_0_TO_1, AT_LEAST_0, AT_LEAST_1
from samplers.untyped import floats

QUANTILES: Column[tuple[float, float] | None] = Column(
    "quantiles of the scores of bundles", "tracker", "whole"
)


def _check_levels(part: str, low: float, high: float) -> None:
    if not 0 < low < high < 1:
        raise UserError(f"{part}'s levels must satisfy 0 < low < high < 1, not ({low}, {high})")


@dataclass(frozen=True)
class RiskPO:
    """Credit for scores between two quantiles and for scores below them: RiskPO
    (arXiv:2510.00911).

    `bundle` consecutive draws are one task: its j-th score s is the sum of their j-th samples'
    values. q and Q are the quantiles of all scores of the batch at `low` and `high`, averaged with
    those of the column QUANTILES where there are any:

        A = [(s - q)+ - (s - Q)+ + q - Q] / (high - low)            the range
        A <- (mix * -(q - s)+ / low + A) / (mix + 1)                with the tail, if mix > 0

    natural  adds q - Q, as published: A is then never positive
    scaled   divides by the std of the bundle's scores
    credit   "uniform": every draw of a bundle has A; "sum_mean": draws have parts of A in
             proportion to value - p

    UserError for draws that do not fill bundles, and for samples without a score.
    """

    bundle: int = 5
    low: float = 0.2
    high: float = 0.8
    mix: float = 1.5
    natural: bool = True
    scaled: bool = False
    credit: Literal["uniform", "sum_mean"] = "uniform"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_levels("RiskPO", self.low, self.high)
        check_number("RiskPO's bundle", self.bundle, AT_LEAST_1)
        check_number("RiskPO's mix", self.mix, AT_LEAST_0)
        check_number("RiskPO's eps", self.eps, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        def rule(value: Tensor, mask: Tensor) -> Tensor:
            return self.rule(value, mask, context.table.get(QUANTILES, None))

        return by_column(credit, context, rule)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)

    def rule(
        self, value: Tensor, mask: Tensor, tracked: tuple[float, float] | None = None
    ) -> Tensor:
        draws, group, r = value.shape
        if draws % self.bundle:
            raise UserError(
                f"RiskPO bundles {self.bundle} draws, but {draws} is not a multiple of that: "
                "change prompts.per_iteration"
            )
        if not mask.all():
            raise UserError(
                "RiskPO sums the scores of a bundle, but one of its samples is unscored, or no "
                "reward applies to it"
            )
        bundles = value.view(-1, self.bundle, group, r)
        score = bundles.sum(1)
        q, upper = self._quantiles(score, tracked)
        risk = (score - q).clamp(min=0) - (score - upper).clamp(min=0)
        if self.natural:
            risk = risk + q - upper
        risk = risk / (self.high - self.low + self.eps)
        if self.mix > 0:
            tail = -(q - score).clamp(min=0) / (self.low + self.eps)
            risk = (self.mix * tail + risk) / (self.mix + 1)
        if self.scaled:
            std = masked_std(score, torch.ones_like(score, dtype=torch.bool), 1, 1)
            risk = torch.where(std > 0, risk / (std + self.eps), 0.0)
        return (risk[:, None] * self._share(bundles)).reshape(value.shape)

    def _quantiles(
        self, score: Tensor, tracked: tuple[float, float] | None
    ) -> tuple[Tensor, Tensor]:
        levels = torch.tensor([self.low, self.high], dtype=score.dtype)
        quantiles = torch.quantile(score.flatten(), levels)
        if tracked is not None:
            quantiles = (quantiles + torch.tensor(tracked, dtype=score.dtype)) / 2
        return quantiles[0], quantiles[1]

    def _share(self, bundles: Tensor) -> Tensor:
        """Share of a bundle's credit for each of its draws [bundles draws group r]."""
        if self.credit == "uniform":
            return torch.ones_like(bundles)
        over = bundles - bundles.mean(2, keepdim=True)
        total = over.sum(1, keepdim=True)
        return torch.where(total.abs() > NONE, over / total, 0.0)


@dataclass
class ScoreQuantiles:
    """Slowly moving quantiles of the bundles' scores: RiskPO (arXiv:2510.00911).

        q <- q + rate (level - share of scores below q)

    This is the gradient of the pinball loss. It starts from the first batch's quantiles.
    """

    bundle: int = 5
    low: float = 0.2
    high: float = 0.8
    rate: float = 0.1
    quantiles: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        _check_levels("ScoreQuantiles", self.low, self.high)
        check_number("ScoreQuantiles's bundle", self.bundle, AT_LEAST_1)
        check_number("ScoreQuantiles's rate", self.rate, ABOVE_0_TO_1)

    def weights(self, prompts: int) -> Float[Tensor, " p"] | None:
        return None

    def before(self, context: Context) -> Context:
        return context.with_column(QUANTILES, self.quantiles)

    def after(self, scores: Scores, context: Context) -> None:
        total = scores.values.double().cpu() @ context.weights.double().cpu()
        bundles = total.view(-1, self.bundle, context.columns.group).sum(1).flatten()
        levels = (self.low, self.high)
        if self.quantiles is None:
            first = floats(torch.quantile(bundles, torch.tensor(levels, dtype=torch.float64)))
            self.quantiles = (first[0], first[1])
            return
        low, high = (
            q + self.rate * (level - float((bundles < q).double().mean()))
            for q, level in zip(self.quantiles, levels, strict=True)
        )
        self.quantiles = (low, high)

    def state(self) -> dict[str, Any]:
        return {} if self.quantiles is None else {"quantiles": list(self.quantiles)}

    def restore(self, state: dict[str, Any]) -> None:
        low_high = state.get("quantiles")
        self.quantiles = None if low_high is None else (low_high[0], low_high[1])


@rests_on("arrays", "mm_adv_riskpo")
@sampling_settings()
def text_riskpo(
    *, length: int = 1024, group: int = 8, bundle: int = 5, low: float = 0.2, high: float = 0.8,
    mix: float = 1.5, clip: float = 0.2,
) -> Algorithm:  # fmt: skip
    """RiskPO, arXiv:2510.00911: scores of bundles of prompts are credited by their position between
    two quantiles, `low` and `high`, that are tracked over iterations, and by how far they fall
    below the lower quantile. `prompts.per_iteration` must be a multiple of `bundle`.

    The published advantage is never positive: only differences matter. So here the batch's mean is
    subtracted and the result is divided by its std, as an option of the authors does within
    bundles.

    group   completions per prompt, at least 1; the j-th of each of a bundle's prompts are scored
            together
    bundle  consecutive prompts that are one task, at least 1; larger gives more tasks a score that
            is neither best nor worst
    low     level of the lower quantile, in (0, 1) and below `high`; scores below it are the tail
    high    level of the upper quantile, in (0, 1) and above `low`; scores above it count as equal
    mix     weight of the tail below the lower quantile, relative to the range between both, at
            least 0; larger cares more for the worst
    """
    credit = (RiskPO(bundle, low, high, mix), OVER_BATCH)
    tracker = partial(ScoreQuantiles, bundle, low, high)
    return texts(length, group, credit, Surrogate(clip, clip), tracker=tracker)
