"""Counts network evaluations, the currency that methods are compared in."""

from dataclasses import dataclass
from typing import Literal

import torch
from accelerate.utils import gather_object

from samplers import Velocity


@dataclass
class Meter:
    """Rows that velocities were asked for, with gradients and without, on this process.

    A row of a guided velocity counts once, though the network then sees it twice.
    """

    graded: int = 0
    frozen: int = 0

    def __call__(self, velocity: Velocity) -> Velocity:
        def metered(x: torch.Tensor, sigma: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                self.graded += len(x)
            else:
                self.frozen += len(x)
            return velocity(x, sigma, prompt)

        return metered

    def total(self, kind: Literal["graded", "frozen"] | None = None) -> float:
        """Over all processes."""
        mine = {"graded": self.graded, "frozen": self.frozen, None: self.graded + self.frozen}[kind]
        return float(sum(gather_object([mine])))
