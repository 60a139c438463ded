"""Trial calls of a user's kernel and solver, and the message for an exception in a user's file."""

from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch

from samplers import Gaussian
from samplers.solvers import Point

_LEVELS = (1.0, 0.8, 0.6, 0.0)  # of the trial of a kernel


def own_error(name: str, error: Exception) -> str:
    """Error message for an exception in the user's function `FILE.py:NAME`, with the file's
    line."""
    file = Path(name.rpartition(":")[0])
    frames = [f for f in extract_tb(error.__traceback__) if Path(f.filename).name == file.name]
    where = f" ({file}, line {frames[-1].lineno})" if frames else ""
    return f"{name} raised {type(error).__name__}: {error}{where}"


def try_kernel(kernel: Any) -> str | None:
    x, v = torch.zeros(2, 3), torch.ones(2, 3)
    at, to = (torch.full((2,), sigma) for sigma in _LEVELS[1:3])
    step = kernel.bound(_LEVELS)(x, v, at, to)
    if not isinstance(step, Gaussian) or step.mean.shape != x.shape or step.std.shape != (2,):
        return "must return samplers.Gaussian(mean [n *d], std [n])"
    return None


def try_solver(solver: Any) -> str | None:
    x, v = torch.zeros(2, 3), torch.ones(2, 3)
    at = Point(x, v, 0.8, 0.6, lambda x, _: x, lambda: torch.zeros(2, 3))
    match solver(at, ()):
        case (torch.Tensor() as end, _) if end.shape == x.shape:
            return None
    return "must return (the next state [n *d], its memory or None)"
