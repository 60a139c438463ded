"""The pairs of a group to compare, and scores of samples from the verdicts.

A group of G has G (G - 1) / 2 pairs, too many for a slow judge if G is large. Designs with fewer
pairs are random and keyed by the prompt's text: they do not depend on the batch, and do not favour
neighbours in a tree of samples.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rewards.types import Samples

Pair = tuple[int, int]
Design = Literal["all", "each", "anchors"]
TOLERANCE = 1e-9  # of log-strengths, between two sweeps
MOST_SWEEPS = 10_000


@dataclass(frozen=True)
class PairBudget:
    """Number of pairs to judge in each group. Every design is connected.

    all      every pair once
    each     every sample is in `count` pairs (one sample in one more if G and count are odd),
             equally often first and second if count is even
    anchors  `count` samples of the group are compared with all others and with each other
    """

    design: Design = "all"
    count: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"all": 0, "each": 2, "anchors": 1}[self.design]
        if self.count < least:
            raise ValueError(
                f"pairs: {self.design} needs a count of at least {least} to connect all "
                f"samples, not {self.count}"
            )
        if self.design == "all" and self.count:
            raise ValueError(
                "pairs: the design all takes no count: leave count out, or set pairs to each or "
                "anchors"
            )

    def pairs(self, samples: Samples) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]]:
        """Rows a and b of the pairs, group by group; a is shown first."""
        chosen: list[Pair] = []
        group = samples.group.tolist()
        for rows in _groups(group):
            # `random` hashes text seeds with SHA-512: the same on all machines and versions
            rng = random.Random(f"{self.seed}/{samples.prompts[rows[0]]}")
            chosen += [(rows[i], rows[j]) for i, j in self.design_of(len(rows), rng)]
        table = torch.tensor(chosen, dtype=torch.long).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def design_of(self, n: int, rng: random.Random) -> list[Pair]:
        """Pairs of the numbers 0..n-1 in this design."""
        if self.design == "all" or self.count >= n - 1:
            return list(combinations(range(n), 2))
        order = rng.sample(range(n), n)
        ring = _ring(n, self.count, rng) if self.design == "each" else _star(n, self.count)
        return [(order[i], order[j]) for i, j in ring]


def _groups(group: Sequence[int]) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for row, g in enumerate(group):
        rows.setdefault(g, []).append(row)
    return list(rows.values())


def _ring(n: int, count: int, rng: random.Random) -> list[Pair]:
    """A circulant graph: each sample meets the samples at a few distances around a ring, on both
    sides.

    Distance 1 connects the ring; the other distances are random, which keeps paths short. Needs 2
    <= count < n - 1. An odd count uses half of the pairs at the longest distance: opposite samples
    for even n, every second pair along its cycle for odd n.
    """
    longest = n // 2
    free = list(range(2, (n - 1) // 2 + 1))
    extra: list[Pair] = []
    if count % 2 == 1 and n % 2 == 0:
        extra = [(i, i + longest) if i % 2 == 0 else (i + longest, i) for i in range(longest)]
    elif count % 2 == 1:
        free.remove(longest)  # n = 2 longest + 1 and longest have no common divisor: one cycle
        cycle = [i * longest % n for i in range(n)]
        extra = [(cycle[i], cycle[(i + 1) % n]) for i in range(0, n, 2)]
    distances = [1, *rng.sample(free, count // 2 - 1)]
    return [(i, (i + d) % n) for d in distances for i in range(n)] + extra


def _star(n: int, count: int) -> list[Pair]:
    """The first `count` samples meet all others; the order within the pairs alternates."""
    pairs = [(i, j) for i in range(count) for j in range(i + 1, n)]
    return [(i, j) if (i + j) % 2 else (j, i) for i, j in pairs]


def win_rates(
    n: int, a: Int[Tensor, " p"], b: Int[Tensor, " p"], p: Float[Tensor, " p"]
) -> Float[Tensor, " n"]:
    """Mean of P(preferred) over the pairs of a sample that have a verdict, 0..1; NaN without
    any."""
    won, met = _tally(n, a, b, p)
    return won / met


def bradley_terry(
    n: int,
    a: Int[Tensor, " p"],
    b: Int[Tensor, " p"],
    p: Float[Tensor, " p"],
    prior: float = 0.5,
) -> Float[Tensor, " n"]:
    """Log-strengths t with P(i preferred to j) = 1 / (1 + exp(t_j - t_i)); NaN without a verdict.

    The maximum of the likelihood (verdicts between 0 and 1 count partly for each side) plus a
    prior: each sample also won and lost `prior` games against a player of log-strength 0. Without
    it a sample that wins all games has no finite strength, and parts of the group that were never
    compared have no common scale. The prior matters less with more pairs. Solved by
    minorise-maximise (Hunter 2004, Annals of Statistics 32, eq. 3): strength <- wins / sum over
    games of 1 / (own + opponent's strength). Each sweep raises the likelihood.
    """
    if prior <= 0:
        raise ValueError(
            f"prior must be above 0, not {prior}: otherwise the strength of a sample that wins "
            "every comparison diverges"
        )
    won, met = _tally(n, a, b, p)
    read = ~p.isnan()
    a, b = a[read].cpu(), b[read].cpu()
    strength = torch.ones(n, dtype=torch.float64)
    for _ in range(MOST_SWEEPS):
        inverse = 1 / (strength[a] + strength[b])
        games = torch.zeros_like(strength).index_add(0, a, inverse).index_add(0, b, inverse)
        fresh = (won + prior) / (games + 2 * prior / (strength + 1))
        moved = (fresh.log() - strength.log()).abs().max() if n else 0.0
        strength = fresh
        if moved < TOLERANCE:
            break
    return torch.where(met > 0, strength.log(), torch.nan)


def _tally(
    n: int, a: Int[Tensor, " p"], b: Int[Tensor, " p"], p: Float[Tensor, " p"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Wins and games of each sample; pairs without a verdict (NaN) do not count."""
    p, a, b = p.double().cpu(), a.cpu(), b.cpu()
    read, first = (~p.isnan()).double(), p.nan_to_num(0.0)
    none = torch.zeros(n, dtype=torch.float64)
    won = none.index_add(0, a, first).index_add(0, b, read - first)
    return won, none.index_add(0, a, read).index_add(0, b, read)
