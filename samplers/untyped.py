"""Typed wrappers of calls that torch's stubs leave untyped."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop


def _listed(values: Tensor) -> Any:
    return values.tolist()


def integers(values: Tensor) -> list[int]:
    """A vector of integers or booleans as a list."""
    return _listed(values)


def integer_rows(values: Tensor) -> list[list[int]]:
    """A matrix of integers as a list of rows."""
    return _listed(values)


def floats(values: Tensor) -> list[float]:
    """A vector as a list of floats."""
    return _listed(values)


def distinct_rows(rows: Int[Tensor, "n m"]) -> tuple[Int[Tensor, "u m"], Int[Tensor, " n"]]:
    """Distinct rows in increasing order, and the index of each row among them."""
    return rows.unique(dim=0, return_inverse=True)


def distinct_numbers(values: Int[Tensor, " n"]) -> tuple[Int[Tensor, " u"], Int[Tensor, " n"]]:
    """Distinct values in increasing order, and the index of each value among them."""
    return values.unique(return_inverse=True)


def normal_quantiles(chances: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Quantiles of the standard normal distribution for these probabilities."""
    return torch.special.ndtri(chances)


def evaluated_again(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Checkpoint a call: it stores only its inputs, and backward evaluates it again, to its end: a
    user's model may turn torch's own exception for an early end into another."""
    with set_checkpoint_early_stop(False):
        result: Any = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result


def split_columns(values: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Cut a matrix [n d] into columns of these sizes."""
    return values.split(sizes, 1)
