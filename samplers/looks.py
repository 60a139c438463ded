"""Clean samples that states on the way stand for: where rewards are asked, and who goes on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Looks:
    """The states before the steps `at`, each finished by an ODE of `steps` Euler steps.

    The levels are the plan's own: None takes all that remain, and fewer steps spread over them. One
    step is the projection x - sigma v; its evaluation is the one that the plan needs anyway.
    """

    at: tuple[int, ...]
    steps: int | None = None

    def __post_init__(self) -> None:
        if list(self.at) != sorted(set(self.at)):
            raise ValueError(f"looks must be at different steps in rising order, got {self.at}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"a completion needs a step, got {self.steps}")

    def levels(self, sigmas: Sequence[float], k: int) -> tuple[float, ...]:
        """The levels of the completion of a state before step k."""
        left = tuple(sigmas[k:])
        last = len(left) - 1
        if self.steps is None or self.steps >= last:
            return left
        return tuple(left[round(last * i / self.steps)] for i in range(self.steps + 1))

    def more(self, sigmas: Sequence[float], k: int) -> int:
        """Network evaluations of a completion beside the one that the plan needs there."""
        return len(self.levels(sigmas, k)) - 2


@dataclass(frozen=True)
class Seen:
    """Clean samples of the distinct states before one step; a draw's are contiguous."""

    step: int
    x0: Float[Tensor, "m *d"]
    prompt: Int[Tensor, " m"]


@dataclass(frozen=True)
class Thinning:
    """Samples that are stopped on the way: Pro-GRPO (arXiv:2512.15347).

    A draw starts with `start` samples. Before each step of `at` the reward of the projection
    x - sigma v is asked for, and those of the most different rewards go on, `keep` of them; the
    last `keep` is the plan's number of roots.
    """

    at: tuple[int, ...]
    keep: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        if len(self.at) != len(self.keep) or not self.at:
            raise ValueError(f"{len(self.at)} steps to stop samples at, but {len(self.keep)} sizes")
        if list(self.at) != sorted(set(self.at)):
            raise ValueError(f"samples are stopped at steps in rising order, got {self.at}")
        sizes = (self.start, *self.keep)
        if list(sizes) != sorted(sizes, reverse=True) or min(sizes) < 2:
            raise ValueError(f"a group shrinks from {self.start} to at least 2, got {self.keep}")

    def width(self, k: int) -> int:
        """Samples of a draw that take step k."""
        return [self.start, *self.keep][sum(at <= k for at in self.at)]

    @property
    def scored(self) -> int:
        """Projections of a draw that are decoded and scored."""
        return sum(self.width(at - 1) for at in self.at)


def extremes(score: Float[Tensor, "n m"], keep: int) -> Int[Tensor, "n keep"]:
    """The rising places of the `keep` scores of each row with the largest variance.

    They are the j highest and the keep - j lowest, for the best j; of several, the one with fewer
    high ones. Scores that are not finite are taken only where the others do not suffice.
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
