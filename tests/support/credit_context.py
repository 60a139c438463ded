"""Inputs of credit with columns of features."""

from typing import Any

from torch import Tensor

from flowrl.credit.values import (
    REFERENCE,
    SAMPLE_STEPS,
    SAMPLE_TURNS,
    TRACKED,
    Context,
    ReferenceRatios,
    SampleTurns,
    TrackedStatistics,
)
from flowrl.table import Table


def columns_of(
    turns: SampleTurns | None = None,
    reference: ReferenceRatios | None = None,
    tracked: TrackedStatistics | None = None,
    steps: Tensor | None = None,
) -> Table:
    """A table of those that are given."""
    each = {SAMPLE_TURNS: turns, REFERENCE: reference, TRACKED: tracked, SAMPLE_STEPS: steps}
    return Table({column: value for column, value in each.items() if value is not None})


def context_of(
    *given: Any, turns=None, reference=None, tracked=None, steps=None, **named
) -> Context:
    """A context with these columns in its table."""
    return Context(*given, table=columns_of(turns, reference, tracked, steps), **named)
