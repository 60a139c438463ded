"""The specification of a prompt data set: where its rows are, and which of them to use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flowrl.errors import UserError
from rewards.types import cell, columns_inside
from samplers.noise import generator

Row = dict[str, Any]
GIVEN_FILE = "given.file"  # begins the places of the rows of given samples


@dataclass(frozen=True)
class PromptRows:
    """Rows with the place of each in its file, such as "line 3".

    folders  of each row, to which its files are relative; empty: all have that of the table
    """

    rows: Sequence[Row]
    places: Sequence[str]
    folders: Sequence[Path] = ()

    def taken(self, rows: Sequence[Row], chosen: Sequence[int]) -> "PromptRows":
        """These rows, which stood at the places `chosen`."""
        folders = [self.folders[i] for i in chosen] if self.folders else ()
        return PromptRows(rows, [self.places[i] for i in chosen], folders)


@dataclass(frozen=True)
class Selection:
    """Selects rows of a data set: the rows that match `where`, shuffled, then cut to the first
    ones.

    where    column -> its value, a list of values, or {min: a number, max: a number}
    shuffle  seed of the order; None: as in the file
    limit    maximum number of rows; None: all
    keep     columns to keep; None: all
    """

    where: Mapping[str, Any] = field(default_factory=dict)
    shuffle: int | None = None
    limit: int | None = None
    keep: tuple[str, ...] | None = None

    @property
    def columns_read(self) -> list[str]:
        """Columns that `where` reads; for a nested column, the one that contains it."""
        return list(dict.fromkeys(name.partition(".")[0] for name in self.where))

    def indices(self, rows: Sequence[Row], at: str) -> list[int]:
        """Indices of the chosen rows. UserError, beginning with `at`, if there are none."""
        chosen = list(range(len(rows)))
        for name, wanted in self.where.items():
            check_column(rows, name, at, "where")
            matching = [i for i in chosen if _matches(cell(rows[i], name), wanted)]
            if not matching:
                values = list(dict.fromkeys(repr(cell(rows[i], name))[:40] for i in chosen[:1000]))
                raise UserError(
                    f"{at}: where: no row has {name}: {wanted!r:.80}; its values are "
                    f"{', '.join(values[:5])}" + (", ..." if len(values) > 5 else "")
                )
            chosen = matching
        if self.shuffle is not None:
            rng = generator(self.shuffle, "rows")
            chosen = [chosen[i] for i in torch.randperm(len(chosen), generator=rng).tolist()]
        return chosen[: self.limit]

    def of(self, table: PromptRows, at: str) -> PromptRows:
        """The chosen rows of a table, with the columns that are kept."""
        if self == Selection() or not table.rows:
            return table
        for name in self.keep or ():
            check_column(table.rows, name, at, "keep")
        chosen = self.indices(table.rows, at)
        rows = [table.rows[i] for i in chosen]
        if self.keep is not None:
            rows = [{name: cell(row, name) for name in self.keep} for row in rows]
        return table.taken(rows, chosen)


@dataclass(frozen=True)
class DataSource:
    """A file, a folder or a hub data set, and how its rows become prompts.

    config, split, revision  of a hub data set; only `split` for a folder
    column      has the prompt: a text, or a list of chat messages
    columns     additional names for columns: new name -> column, which may be nested
    drop_reply  leave out an assistant's message at the end of a chat
    unpacked    GiB that a hub data set may take once unpacked; None: flowrl's own bound
    """

    source: str
    column: str = "prompt"
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    selection: Selection = Selection()
    columns: Mapping[str, str] = field(default_factory=dict)
    drop_reply: bool = False
    unpacked: float | None = None

    def unused(self, *names: str) -> str | None:
        """The first of these fields that is set."""
        return next((name for name in names if getattr(self, name) is not None), None)


def of_given(place: str) -> bool:
    """Whether a row's place is in the file of given samples, whose settings are others than those
    of prompts."""
    return place.startswith(GIVEN_FILE)


def column_setting(place: str) -> str:
    """The setting that names the column of the prompts, for a row at this place."""
    return "given.column" if of_given(place) else "prompts.column"


def way_without_row(place: str) -> str:
    """The words for leaving out the row at this place."""
    return "take such rows out of the file" if of_given(place) else "leave such rows out (where)"


def has_cell(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has a column or nested column."""
    first, dot, rest = name.partition(".")
    inner = columns_inside(row.get(first)) if dot else None
    return name in row or bool(inner is not None and has_cell(inner, rest))


CHAT_NAMES = ("messages", "conversations")  # of lists of messages
PROMPT_NAMES = ("prompt", "prompts", "text", "caption", "question", "instruction")


def check_column(rows: Sequence[Row], name: str, at: str, setting: str = "") -> None:
    """UserError, listing the existing columns, if no row has a column or nested column; `setting`
    names it."""
    if any(has_cell(row, name) for row in rows):
        return
    names = [str(key)[:50] for key in rows[0]]
    names += [name[:50] for key, v in rows[0].items() for name in _names_inside(str(key), v)]
    wanted = f"{name!r} ({setting})" if setting else repr(name)
    columns = ", ".join(names[:20]) or "no columns"
    if len(rows) == 1 and (inside := _inside(rows[0])) is not None:
        remedy = f": its rows are inside of {inside!r}: save that list as a file of its own"
    else:
        remedy = _remedy(rows[0], at) if setting else _remedy_of_prompts(rows[0], name, at)
    raise UserError(f"{at} has no column {wanted}; it has {columns}{remedy}")


def _names_inside(column: str, value: Any) -> list[str]:
    """The nested columns of a cell; of a list those of its first entry."""
    inside = columns_inside(value)
    if isinstance(value, list | tuple) and value:
        return _names_inside(f"{column}.0", value[0]) or [f"{column}.0"]
    return [f"{column}.{name}" for name in inside or ()]


def _inside(row: Row) -> str | None:
    """The only cell of a row that is a list of rows."""
    lists = [key for key, cells in row.items() if isinstance(cells, list) and len(cells) > 1]
    lists = [key for key in lists if all(isinstance(one, Mapping) for one in row[key])]
    talks = [key for key in lists if "role" in row[key][0] or "from" in row[key][0]]
    return str(lists[0]) if len(lists) == 1 and not talks else None


OTHER_SEPARATOR = "its cells are not separated by commas; save it with commas, or as jsonl"


def other_separator(names: Sequence[str]) -> bool:
    """Whether the only column of a CSV has a name like several that something else separates."""
    return len(names) == 1 and any(mark in names[0] for mark in ";\t|")


def _remedy(row: Row, at: str) -> str:
    """The likely fix for a missing column of any kind: in a CSV, another separator."""
    of_cells = at.lower().endswith((".csv", ".tsv"))
    return f": {OTHER_SEPARATOR}" if of_cells and other_separator([*map(str, row)]) else ""


def _remedy_of_prompts(row: Row, name: str, at: str) -> str:
    """The likely fix for a missing prompt column: another name or, in a CSV, another separator, or
    a first line that already is a prompt."""
    names = [str(key) for key in row]
    likely = likely_column(row, name)
    if likely is not None:
        return f": set column: {likely}"
    if names == ["image"] or names == ["video"]:
        return (
            f": its {names[0]}s have no texts; put metadata.jsonl beside them, with file_name and "
            f"{name} in each line"
        )
    if not at.lower().endswith((".csv", ".tsv")):
        return f": set column: {names[0]}" if len(names) == 1 else ""
    if other_separator(names):
        return f": {OTHER_SEPARATOR}"
    if len(names) == 1 and " " in names[0].strip():
        return f": its first line has no column names; add the line {name!r} above it"
    if names and (" " in names[0].strip() or any(map(_is_number, names))):
        return (
            ": its first line seems to be a row; add a line with column names above it, with "
            f"{name!r} for the prompts"
        )
    if len(names) == 1:
        return (
            f": set column: {names[0]}, or add the line {name!r} above it if this first line "
            "is a prompt"
        )
    return ""


def likely_column(row: Row, name: str) -> str | None:
    """The column of a row that may have the prompt that `name` lacks; None if no name says so."""
    likely = [key for key in map(str, row) if key.strip().lower() in (name.lower(), *PROMPT_NAMES)]
    likely += [key for key in CHAT_NAMES if isinstance(row.get(key), list)]
    return likely[0] if likely else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _matches(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list | tuple):
        return value in wanted
    if not isinstance(wanted, Mapping):
        return value == wanted
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    low, high = wanted.get("min"), wanted.get("max")
    return (low is None or value >= low) and (high is None or value <= high)
