"""A row of a preference data set: its samples and their human judgements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

PreferenceRow = Mapping[str, Any]


class Answer(str):
    """A sample that is a text, rather than the name of a file."""


class JudgedRow(NamedTuple):
    """One row of a file: samples of one prompt with a label (for two samples) or ranks.

    more    additional columns: `category`, and `source`, the image that was edited, as a cell of a
            table
    """

    prompt: Any
    media: Sequence[Any]
    label: float | None = None
    ranks: Sequence[float] = ()
    more: Mapping[str, Any] = {}


@dataclass(frozen=True)
class PreferenceLayout:
    columns: tuple[str, ...]
    read: Callable[
        [PreferenceRow, str, str], JudgedRow | None
    ]  # row, dimension, place; None if there is no judgement
    dimension: str = ""  # the column with the labels, if there is a choice
    samples: str = ""  # the column of a list of samples, which may also be one sample per row


def edited_source(row: PreferenceRow) -> dict[str, Any]:
    """`more` of a row whose samples are edits of its `source_image`; empty for other rows."""
    return {"source": row["source_image"]} if row.get("source_image") else {}
