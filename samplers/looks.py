"""Predicted clean samples of intermediate states: which are scored, and which samples continue."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Looks:
    """Intermediate rewards: the states before the steps `at` are completed by an ODE of `steps`
    Euler steps and scored.

    The levels are the plan's own: None takes all that remain, and fewer steps spread over them. One
    step is the projection x - sigma v, whose evaluation the plan needs anyway.
    """

    at: tuple[int, ...]
    steps: int | None = None

    def __post_init__(self) -> None:
        if list(self.at) != sorted(set(self.at)):
            raise ValueError(
                "steps of intermediate rewards must be different and in increasing order, got "
                f"{self.at}"
            )
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"a completion needs at least 1 step, not {self.steps}")

    def levels(self, sigmas: Sequence[float], k: int) -> tuple[float, ...]:
        """Noise levels that complete a state from before step k."""
        left = tuple(sigmas[k:])
        last = len(left) - 1
        if self.steps is None or self.steps >= last:
            return left
        return tuple(left[round(last * i / self.steps)] for i in range(self.steps + 1))

    def more(self, sigmas: Sequence[float], k: int) -> int:
        """Network evaluations that a completion adds to the plan's own evaluation of its state."""
        return len(self.levels(sigmas, k)) - 2


@dataclass(frozen=True)
class Seen:
    """Predicted clean samples of the distinct states before one step; samples of a draw are
    contiguous."""

    step: int
    x0: Float[Tensor, "m *d"]
    prompt: Int[Tensor, " m"]


@dataclass(frozen=True)
class Thinning:
    """Early stopping of samples: Pro-GRPO (arXiv:2512.15347).

    A draw starts with `start` samples. Before each step of `at` the projection x - sigma v is
    scored, and the `keep` samples with the most different rewards continue; the last `keep` is the
    plan's number of roots.
    """

    at: tuple[int, ...]
    keep: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        if len(self.at) != len(self.keep) or not self.at:
            raise ValueError(
                f"{len(self.at)} steps at which samples stop need as many group sizes, got "
                f"{len(self.keep)}"
            )
        if list(self.at) != sorted(set(self.at)):
            raise ValueError(f"steps at which samples stop must increase, got {self.at}")
        sizes = (self.start, *self.keep)
        if list(sizes) != sorted(sizes, reverse=True) or min(sizes) < 2:
            raise ValueError(
                f"group sizes must decrease from {self.start} to at least 2, got {self.keep}"
            )

    def width(self, k: int) -> int:
        """Samples per draw that take step k."""
        return [self.start, *self.keep][sum(at <= k for at in self.at)]

    @property
    def scored(self) -> int:
        """Predicted clean samples per draw that are decoded and scored."""
        return sum(self.width(at - 1) for at in self.at)


def extremes(score: Float[Tensor, "n m"], keep: int) -> Int[Tensor, "n keep"]:
    """Indices, in increasing order, of the `keep` scores of each row that have the largest
    variance.

    These are the j highest and the keep - j lowest scores, for the best j (the smallest such j).
    Scores that are not finite are taken only if there are too few others.
    """
    n, m = score.shape
    if not 1 <= keep <= m:
        raise ValueError(f"cannot keep {keep} of {m} samples")
    known = score.isfinite()
    order = score.double().masked_fill(~known, torch.inf).argsort(dim=1, stable=True)
    chosen = torch.empty(n, keep, dtype=torch.long)
    for row in range(n):
        count = int(known[row].sum())
        if count <= keep:
            chosen[row] = order[row, :keep].cpu()
            continue
        values = score[row].double()[order[row]]
        ends = [[*range(keep - high), *range(count - high, count)] for high in range(keep + 1)]
        spread = [float(values[places].var(correction=0)) for places in ends]
        chosen[row] = order[row, ends[spread.index(max(spread))]].cpu()
    return chosen.sort(dim=1).values
