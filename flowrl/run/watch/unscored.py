"""A test of whether samples without a score differ from those with one, at every iteration.

Each statistic is turned into ranks among the iteration's samples, -1/2..1/2. Let S be the sum of
the ranks of unscored samples. If scores are lost by chance, a group that loses m of its samples
adds at most V (exp(t c) - 1 - t c) / c^2 to log E exp(t S), c = m / 2 (Bernstein's inequality).
V = m^2 var(group means) + m mean(var in a group) allows for failures that take a whole group, as a
failed request to a server may. So exp(t S - bounds), multiplied over iterations, is a fair bet
against chance for each t, and the mean of several bets exceeds 1/p with probability at most p at
any time of a run, however often one looks (Ville's inequality).
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

TILTS = tuple(sign * 0.1 * 2**k for sign in (-1, 1) for k in range(6))
Evidence = Mapping[str, Sequence[float]]  # by statistic: the logarithm of each tilt's bet


def unscored_evidence(
    scored: Tensor, group: int, columns: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """Evidence of one iteration; empty if all samples or none have a score.

    scored     [n] bool
    group      size of the groups, which are contiguous rows
    columns    statistics of the samples, [n] each
    """
    if scored.all() or not scored.any():
        return {}
    return {name: _bets(scored, group, _ranks(column)) for name, column in columns.items()}


def _ranks(column: Tensor) -> Tensor:
    """Rank each number within -1/2..1/2; equal ones share their mean rank. NaN is the middle."""
    known = column.double().nan_to_num(float(column.double().nanmedian()))
    ordered = known.sort().values
    below, up_to = (
        torch.searchsorted(ordered, known),
        torch.searchsorted(ordered, known, right=True),
    )
    return (below + up_to).double() / (2 * len(known)) - 0.5


def _bets(scored: Tensor, group: int, ranks: Tensor) -> list[float]:
    parts = ranks.view(-1, group)
    between = float(parts.mean(1).var(correction=0))
    within = float(parts.var(1, correction=0).mean())
    total = float(ranks[~scored].sum())
    bets = [tilt * total for tilt in TILTS]
    for lost in (~scored).view(-1, group).sum(1).tolist():
        if lost:
            bound, variance = lost / 2, lost * lost * between + lost * within
            for k, tilt in enumerate(TILTS):
                reach = min(abs(tilt) * bound, 300.0)  # beyond it the bet is lost for good
                bets[k] -= variance * (math.expm1(reach) - reach) / bound**2
    return bets


def differing(evidence: Evidence, p: float) -> list[tuple[str, bool]]:
    """Statistics in which unscored samples differ, with error probability `p` over all statistics
    and all times of a run; and whether theirs are higher."""
    found = []
    for name, bets in evidence.items():
        total = torch.tensor(bets, dtype=torch.float64)
        if float(total.logsumexp(0)) - math.log(len(bets)) > math.log(len(evidence) / p):
            found.append((name, TILTS[int(total.argmax())] > 0))
    return found
