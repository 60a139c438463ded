"""Where samples and gradients are worth their cost: which groups, which samples, how many, of what.

The first part masks credit, so it is a transform of any advantage, of pictures and texts alike.
The second part says how many samples a prompt should get, and which prompts to draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.credit import Context, Credit, at_leaves, masked_mean, masked_std
from flowrl.errors import UserError
from samplers.noise import generator


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
class KeepRate:
    """Masks groups whose mean score is outside low..high: prompts that are too hard or too easy for
    now teach little (online difficulty filtering, arXiv:2504.03380)."""

    low: float = 0.2
    high: float = 0.8

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise UserError(f"KeepRate({self.low}, {self.high}) keeps nothing: low is above high")

    def __call__(self, credit: Credit, context: Context) -> Credit:
        mean = masked_mean(*_grouped(credit, context), 1)
        return _only(credit, (mean >= self.low) & (mean <= self.high), context)


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


def gain(rate: Float[Tensor, " g"], samples: int) -> Float[Tensor, " g"]:
    """What `samples` of prompts with success rate p are worth: the chance that they differ,
    1 - p^n - (1 - p)^n, times what a gradient then moves, p (1 - p)^2 (Knapsack RL,
    arXiv:2509.25849). 0 for none."""
    if samples == 0:
        return torch.zeros_like(rate)
    chance = 1 - rate**samples - (1 - rate) ** samples
    return chance * rate * (1 - rate) ** 2


def knapsack(
    rates: Float[Tensor, " g"], total: int, least: int = 2, most: int = 128, unit: int = 1
) -> list[int]:
    """Units of so many samples a prompt that add up to `total` and gain the most, each prompt's
    within least..most.

    `gain` has falling returns from two samples on, so giving each further unit to the prompt that
    gains most from it is exact. Prompts that gain nothing get what is left over, in turn.
    """
    g = len(rates)
    if not g * least <= total <= g * most:
        raise UserError(
            f"{total} samples do not go into {g} prompts of {least} to {most} samples each"
        )
    rates = rates.double()
    worth = [gain(rates, n * unit) for n in range(least, most + 1)]
    steps = [(more - less).tolist() for less, more in pairwise(worth)]
    counts = [least] * g
    for _ in range(total - g * least):
        open_ones = [i for i in range(g) if counts[i] < most]
        best = max(open_ones, key=lambda i: (steps[counts[i] - least][i], -counts[i], -i))
        counts[best] += 1
    return counts


def uncertainty(
    rates: Float[Tensor, " g"], visits: Float[Tensor, " g"], fade: float = 0.0, floor: float = 0.05
) -> Float[Tensor, " g"]:
    """Weights of prompts, sqrt(p (1 - p)) / visits^fade + floor: those that could go either way
    come more often, and none never (single-stream, arXiv:2509.13232)."""
    spread = (rates * (1 - rates)).clamp(min=0).sqrt()
    return spread / visits.clamp(min=1) ** fade + floor


def weighted_draw(weights: Float[Tensor, " g"], count: int, key: Sequence[int | str]) -> list[int]:
    """`count` different prompts, drawn one after the other in proportion to their weights.

    Noise is keyed, so a resumed run draws the same.
    """
    positive = int((weights > 0).sum())
    if count > positive:
        raise UserError(f"{count} prompts are wanted, and {positive} have a weight above 0")
    uniform = torch.rand(len(weights), generator=generator(*key), dtype=torch.float64)
    return (weights.double().log() - (-uniform.log()).log()).topk(count).indices.tolist()
