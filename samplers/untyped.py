"""Typed wrappers of calls that torch's stubs leave untyped."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def _listed(values: Tensor) -> Any:
    return values.tolist()


def integers(values: Tensor) -> list[int]:
    """The numbers of a vector of integers or truths."""
    return _listed(values)


def integer_rows(values: Tensor) -> list[list[int]]:
    """The rows of a matrix of integers."""
    return _listed(values)


def floats(values: Tensor) -> list[float]:
    """The numbers of a vector."""
    return _listed(values)


def distinct_rows(rows: Int[Tensor, "n m"]) -> tuple[Int[Tensor, "u m"], Int[Tensor, " n"]]:
    """The different rows in rising order, and the place of each row among them."""
    return rows.unique(dim=0, return_inverse=True)


def distinct_numbers(values: Int[Tensor, " n"]) -> tuple[Int[Tensor, " u"], Int[Tensor, " n"]]:
    """The different numbers in rising order, and the place of each value among them."""
    return values.unique(return_inverse=True)


def normal_quantiles(chances: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The numbers that a standard normal is below with these chances."""
    return torch.special.ndtri(chances)


def evaluated_again(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """A call that keeps its inputs alone: backward evaluates it once more."""
    found: Any = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return found
