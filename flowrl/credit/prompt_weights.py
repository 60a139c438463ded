"""Advantages weighted by a number of the prompt file, such as a difficulty or a price."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.credit.values import Context, Credit
from flowrl.errors import UserError
from flowrl.table import Column
from samplers.number_ranges import is_finite
from samplers.untyped import integers

PROMPT_ROWS: Column[Sequence[Mapping[str, Any]]] = Column(
    "rows of the prompt file", "prompt_rows", "whole"
)


@runtime_checkable
class ChecksPromptRows(Protocol):
    """A transform that needs something of every row of the prompt file."""

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """UserError that names the first row without it."""
        ...


def check_prompt_rows(parts: Sequence[object], rows: Sequence[Mapping[str, Any]]) -> None:
    """UserError for a row that lacks what one of these parts needs."""
    for part in parts:
        if isinstance(part, ChecksPromptRows):
            part.check_rows(rows)


def as_weight(value: object) -> float | None:
    """A finite number of at least 0; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if is_finite(value) and value >= 0 else None


@dataclass(frozen=True)
class PromptWeight:
    """Advantages of a prompt's samples times a number of its row.

        A <- w A,  w = the value of `column`

    column  of the prompt file; every row needs a finite number of at least 0 there
    mean    divides by the mean number of the iteration's draws, so that the size of the loss does
            not depend on the unit
    """

    column: str
    mean: bool = True

    reads: ClassVar[tuple[Column[Any], ...]] = (PROMPT_ROWS,)

    def __post_init__(self) -> None:
        if not self.column:
            raise UserError("PromptWeight needs the name of a column of the prompt file")

    def __call__(self, credit: Credit, context: Context) -> Credit:
        rows = context.needed(PROMPT_ROWS, "PromptWeight")
        if context.prompts is None:
            raise UserError("PromptWeight needs the prompts of the draws: Context(prompts=...)")
        weights = self.weights(rows, integers(context.prompts))
        of_samples = weights.repeat_interleave(len(credit.value) // len(weights))
        return credit._replace(value=credit.value * of_samples[:, None, None])

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.weights(rows, range(len(rows)))

    def weights(
        self, rows: Sequence[Mapping[str, Any]], draws: Sequence[int]
    ) -> Float[Tensor, " g"]:
        """Weight of each draw. UserError that names the row for anything but a number."""
        numbers: list[float] = []
        for row in draws:
            value = rows[row].get(self.column) if row < len(rows) else None
            weight = as_weight(value)
            if weight is None:
                raise UserError(
                    f"PromptWeight: row {row + 1} of prompts.train has {value!r} in the column "
                    f"{self.column}: give every prompt a number of at least 0"
                )
            numbers.append(weight)
        weights = torch.tensor(numbers, dtype=torch.float64)
        return weights / weights.mean().clamp(min=1e-12) if self.mean else weights
