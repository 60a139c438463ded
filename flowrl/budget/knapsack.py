"""The allocation of an iteration's samples to its prompts."""

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import UserError


def gain(rate: Float[Tensor, " g"], samples: int) -> Float[Tensor, " g"]:
    """Value of `samples` for a prompt with success rate p: the probability that they differ, 1 -
    p^n - (1 - p)^n, times the expected gradient, p (1 - p)^2 (Knapsack RL, arXiv:2509.25849). 0 for
    no samples."""
    if samples == 0:
        return torch.zeros_like(rate)
    chance = 1 - rate**samples - (1 - rate) ** samples
    return chance * rate * (1 - rate) ** 2


def knapsack(
    rates: Float[Tensor, " g"], total: int, least: int = 2, most: int = 128, block: int = 1
) -> list[int]:
    """Number of blocks of `block` samples per prompt that sum to `total` and maximise the gain,
    each within least..most.

    `gain` has diminishing returns from two samples on, so greedily giving each further block to the
    prompt with the largest gain is optimal. Prompts that gain nothing share the rest in turn.
    """
    g = len(rates)
    if not g * least <= total <= g * most:
        raise UserError(
            f"{g} prompts of {least} to {most} samples each cannot add up to {total} samples"
        )
    rates = rates.double()
    worth = [gain(rates, n * block) for n in range(least, most + 1)]
    steps = [(more - less).tolist() for less, more in pairwise(worth)]
    counts = [least] * g
    for _ in range(total - g * least):
        open_ones = [i for i in range(g) if counts[i] < most]
        best = max(open_ones, key=lambda i: (steps[counts[i] - least][i], -counts[i], -i))
        counts[best] += 1
    return counts
