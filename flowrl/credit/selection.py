"""Advantage transforms that select groups and samples to train on, and mask the others."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowrl.credit.choices import Choices
from flowrl.credit.values import Context, Credit, at_leaves, masked_std
from flowrl.errors import UserError
from flowrl.number_checks import check_number
from samplers.number_ranges import AT_LEAST_0


def _grouped(credit: Credit, context: Context) -> tuple[Tensor, Tensor]:
    """Values and mask [g group r] of each sample, at its last decision point."""
    shape = (-1, context.columns.group, credit.value.shape[-1])
    last = credit.mask.long().cumsum(1).argmax(1, keepdim=True)
    value, mask = (part.gather(1, last).reshape(shape) for part in credit)
    return value, mask


def _only(credit: Credit, trained: Tensor, context: Context) -> Credit:
    """Mask all decision points of samples that are not `trained` [g m r], m 1 or the group."""
    group = context.columns.group
    mask = credit.mask & at_leaves(trained, group)[:, None]
    return Credit(credit.value * mask, mask)


@dataclass(frozen=True)
class DropFlat:
    """Masks groups whose samples all score the same: DAPO's dynamic sampling (arXiv:2503.14476).

        kept = std(group) > least

    Masked groups are not in the loss's denominator either. Continuous rewards need a `least` above
    0. Put it before transforms that normalise.

    least  standard deviation of a group, in units of the rewards, up to which it is masked, at
           least 0
    """

    least: float = 0.0

    def __post_init__(self) -> None:
        check_number("DropFlat's least", self.least, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return _only(credit, masked_std(*_grouped(credit, context), 1, 0) > self.least, context)

    def refuses(self, choices: Choices) -> str | None:
        if any(plan.group < 2 for plan in choices.plans):
            return "DropFlat drops every group of one sample; leave it out, or use a larger group"
        return None


@dataclass(frozen=True)
class BestAnd:
    """The best sample of each group, and one other; the rest are masked: PF-PPO's filters
    (arXiv:2409.06957), for rewards that are most reliable at their extremes.

    other   random (BR), worst (BW), or none (only the best)

    Samples of a group are drawn independently, so the first sample other than the best is a random
    one. Put it after transforms that normalise, so that their statistics cover all samples.
    """

    other: Literal["random", "worst", "none"] = "random"

    def __call__(self, credit: Credit, context: Context) -> Credit:
        value, mask = _grouped(credit, context)
        best = value.masked_fill(~mask, -torch.inf).argmax(1, keepdim=True)
        index = torch.arange(value.shape[1])[:, None].expand_as(value)
        chosen = index == best
        if self.other != "none":
            left = mask & ~chosen
            low = value if self.other == "worst" else index.to(value)
            chosen = chosen | (index == low.masked_fill(~left, torch.inf).argmin(1, keepdim=True))
        return _only(credit, chosen & mask, context)


@dataclass(frozen=True)
class MaxVariance:
    """Keeps the subset of each group with the largest variance and masks the others: PODS.

        kept = argmax_{|S| = keep} var(values of S)

    arXiv:2504.13818. The subset has the j highest and the keep - j lowest values, for the best j.
    Put it after transforms that normalise, so that their statistics cover all samples.

    keep  samples of a group that stay, at least 2
    """

    keep: int

    def __post_init__(self) -> None:
        if self.keep < 2:
            raise UserError(
                f"MaxVariance keeps {self.keep}, but must keep at least 2: one sample has no "
                "variance"
            )

    def __call__(self, credit: Credit, context: Context) -> Credit:
        if self.keep > context.columns.group:
            raise UserError(
                f"MaxVariance cannot keep {self.keep} samples of a group of "
                f"{context.columns.group}: lower keep"
            )
        value, mask = _grouped(credit, context)
        order = value.masked_fill(~mask, torch.inf).argsort(dim=1, stable=True)
        rank, count = order.argsort(1), mask.sum(1, keepdim=True)
        best, most = mask, torch.full_like(value[:, :1], -1.0)
        for high in range(self.keep + 1):
            chosen = mask & ((rank < self.keep - high) | (rank >= count - high))
            spread = masked_std(value, chosen, 1, 0)
            best = torch.where(spread > most, chosen, best)
            most = torch.maximum(spread, most)
        return _only(credit, best, context)
