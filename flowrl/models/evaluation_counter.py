"""Counts network evaluations, the cost unit in which methods are compared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from flowrl.likelihoods.rows import TokenRows
from samplers.host import on_host

T = TypeVar("T")


@dataclass
class Meter:
    """Counts policy evaluations on this process, with and without gradients.

    The units are states of a flow (a guided velocity counts once, though its network runs twice)
    and tokens of a completion.
    """

    graded: int = 0
    frozen: int = 0

    def __call__(self, policy: Callable[..., T]) -> Callable[..., T]:
        def metered(asked: torch.Tensor | TokenRows, *more: Any) -> T:
            self.add(
                len(asked) if isinstance(asked, torch.Tensor) else int(on_host(asked.lengths).sum())
            )
            return policy(asked, *more)

        return metered

    def add(self, count: int) -> None:
        if torch.is_grad_enabled():
            self.graded += count
        else:
            self.frozen += count

    def total(
        self, gather: Callable[[int], list[int]], kind: Literal["graded", "frozen"] | None = None
    ) -> float:
        """Sum over all processes; `gather` gathers their counts, like `Parallel.every`."""
        mine = {"graded": self.graded, "frozen": self.frozen, None: self.graded + self.frozen}[kind]
        return float(sum(gather(mine)))
