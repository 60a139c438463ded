"""A kernel with a noise of its own at each step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from samplers.kernels import Gaussian, Kernel, reverse_sde
from samplers.planners import last_step


@dataclass(frozen=True)
class TableSDE:
    """Noise from a table, one g per step: DenseGRPO (arXiv:2601.20218), which calibrates it.

    Formula: x' = x - h (v + g^2 noise_hat / (2 sigma)) + g sqrt(h) noise,
    noise_hat = x + (1 - sigma) v, g = table[step]

    The table has a number for each step but the last. `sigmas` are the levels to which it is bound.

    table   list of g, one number above 0 for each step but the last; `flowrl calibrate` finds them
    sigmas  levels that the table belongs to, from 1 down; null, as a run needs it, are the
            pipeline's
    """

    affine = True
    table: tuple[float, ...]
    sigmas: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.table or not all(0 < g < math.inf for g in self.table):
            raise ValueError(f"a noise table needs numbers above 0, got {self.table}")

    def __call__(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Gaussian:
        if self.sigmas is None:
            raise ValueError(
                "TableSDE is not bound to noise levels: call kernel.bound(sigmas) first"
            )
        levels = torch.tensor(self.sigmas[: len(self.table)], dtype=sigma.dtype)
        step = (sigma[:, None] - levels.to(sigma.device)).abs().argmin(1)
        g = torch.tensor(self.table, dtype=sigma.dtype).to(sigma.device)[step]
        return reverse_sde(x, v, sigma, sigma_next, g)

    def bound(self, sigmas: Sequence[float]) -> "TableSDE":
        if self.sigmas is not None:
            return self
        least, most = last_step(sigmas), len(sigmas) - 1
        if not least <= len(self.table) <= most:
            raise ValueError(
                f"a noise table of {len(self.table)} numbers does not fit {most} steps: give "
                f"{most - 1}, one for each step but the last"
            )
        return replace(self, sigmas=tuple(sigmas))


def as_table(kernel: Kernel, sigmas: Sequence[float]) -> TableSDE:
    """Noise table of a kernel, g = std / sqrt(h), at the noisy steps of a list."""
    kernel, noisy = kernel.bound(sigmas), range(last_step(sigmas))
    at, to = (torch.tensor([sigmas[k + i] for k in noisy], dtype=torch.float64) for i in (0, 1))
    zero = torch.zeros(len(noisy), 1, dtype=torch.float64)
    g = kernel(zero, zero, at, to).std / (at - to).sqrt()
    return TableSDE(tuple(float(value) for value in g))
