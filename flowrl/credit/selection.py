"""Credit of some samples only: groups and samples that are worth a gradient; the others are
masked."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.credit.values import Context, Credit, at_leaves, masked_std
from flowrl.errors import UserError


def _grouped(credit: Credit, context: Context) -> tuple[Tensor, Tensor]:
    """Values and mask of the samples themselves: those of the last decision point that each has,
    [g group r]."""
    shape = (-1, context.columns.group, credit.value.shape[-1])
    last = credit.mask.long().cumsum(1).argmax(1, keepdim=True)
    value, mask = (part.gather(1, last).reshape(shape) for part in credit)
    return value, mask


def _only(credit: Credit, kept: Tensor, context: Context) -> Credit:
    """`kept` [g m r] with m 1 or the group: the others are masked at all decision points."""
    group = context.columns.group
    mask = credit.mask & at_leaves(kept, group)[:, None]
    return Credit(credit.value * mask, mask)


@dataclass(frozen=True)
class DropFlat:
    """Masks groups whose samples all score the same, so that they are not in the loss's denominator
    either: dynamic sampling that drops (DAPO, arXiv:2503.14476). `least` is the std that a group
    must exceed; continuous rewards need one above 0.

    Put it before what normalises.
    """

    least: float = 0.0

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return _only(credit, masked_std(*_grouped(credit, context), 1, 0) > self.least, context)


@dataclass(frozen=True)
class MaxVariance:
    """Trains on the `keep` samples of each group whose values differ most; the others are masked.

    The subset of greatest variance has the j highest and the keep - j lowest, for the best j (PODS,
    arXiv:2504.13818). Put it behind what normalises, so that statistics are of all samples.
    """

    keep: int

    def __post_init__(self) -> None:
        if self.keep < 2:
            raise UserError(f"MaxVariance keeps {self.keep} samples, and one has no variance")

    def __call__(self, credit: Credit, context: Context) -> Credit:
        if self.keep > context.columns.group:
            raise UserError(
                f"MaxVariance keeps {self.keep} of a group of {context.columns.group}: lower it"
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
