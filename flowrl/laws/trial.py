"""Trial calls of a part: its errors become sentences, and it may not change what it is given."""

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

import torch
from torch import Tensor

from flowrl.errors import UserError

T = TypeVar("T")
TRIAL_LEVELS = (1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0)  # noise levels of trials without a plan


def part_title(part: object) -> str:
    """The name of a part in messages: its class, or a function's own name."""
    return part.__name__ if isinstance(part, FunctionType) else type(part).__name__


def tried(name: str, word: str, call: Callable[[], T]) -> T:
    """The result of a trial call. UserError for any exception in it."""
    try:
        return call()
    except UserError:
        raise
    except Exception as error:  # a user's code runs here, and may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"{name} fails in a trial call as a {word} ({reason})") from error


def agree(a: Tensor, b: Tensor, size: Tensor | float = 1.0, room: float = 1e-5) -> bool:
    """Whether tensors agree up to rounding, relative to `size`."""
    return a.shape == b.shape and bool(((a - b).abs() <= room * torch.as_tensor(size)).all())


def normals(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64, the same in every call."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
