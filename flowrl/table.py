"""Columns that features add to an iteration's records.

A record of the plain path (samples, credit, rows) has a field for what every sample has. What only
a feature knows, such as the gate of GARDO or the turns of a conversation, is a `Column` in the
record's `Table`: the feature that owns it writes it, and a part that reads it names it. Taking,
joining, gathering and moving walk all columns, so a new column is written in one place.

tensordict does the same for tensors alone. It was not taken: its releases ask for one release of
torch each, its entries have one leading size where ours have three forms, and a frozen field would
still have to hold what is not a tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from samplers.token_support import TokenSupport, joined_column

T = TypeVar("T")
ColumnForm = Literal["whole", "sample", "row"]
STAGES = ("draw", "sample", "score", "credit", "rows", "update")
Leaf = Tensor | TokenSupport  # what has rows


@dataclass(frozen=True)
class Column(Generic[T]):
    """A named column.

    name   unique among all columns
    owner  who writes it. A feature, by the name of its module in `flowrl.iteration.features`: a run
           opens it for a part that reads the column. Or one of `STAGES`, which writes the column
           where a run has what it holds, so that nothing has to be opened
    form   what its leading size counts: samples, or rows of a loss; `whole` is one value for all
    part   the part of an algorithm without which the owner has nothing to write; None if it needs
           none
    """

    name: str
    owner: str
    form: ColumnForm = "sample"
    part: str | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Table:
    """Values by column. Immutable: `with_value` returns another table."""

    values: Mapping[Column[Any], Any] = field(default_factory=dict[Column[Any], Any])

    def __getitem__(self, column: Column[T]) -> T:
        """The value of a column. KeyError, in a sentence, if its owner has not written it."""
        if column not in self.values:
            raise KeyError(f"{column.name}: {column.owner} writes this column, and has not here")
        return self.values[column]

    def get(self, column: Column[T], otherwise: T) -> T:
        """The value of a column, or another if its owner has not written it."""
        return self.values.get(column, otherwise)

    def __contains__(self, column: Column[Any]) -> bool:
        return column in self.values

    def __iter__(self) -> Iterator[Column[Any]]:
        return iter(self.values)

    def __or__(self, other: "Table") -> "Table":
        return Table({**self.values, **other.values}) if other.values else self

    def with_value(self, column: Column[T], value: T) -> "Table":
        return Table({**self.values, column: value})

    def without(self, column: Column[Any]) -> "Table":
        return Table({key: value for key, value in self.values.items() if key != column})

    def arranged(self, move: Callable[[Any], Any], *forms: ColumnForm) -> "Table":
        """Apply `move` to the tensors [n ...] of the columns of these forms; others stay."""
        if not self.values:
            return self
        return Table(
            {
                key: changed(value, move) if key.form in forms else value
                for key, value in self.values.items()
            }
        )


EMPTY = Table()


@runtime_checkable
class ReadsColumns(Protocol):
    """A part of an algorithm that reads columns of features."""

    @property
    def reads(self) -> tuple[Column[Any], ...]: ...


@runtime_checkable
class ProvidesColumns(Protocol):
    """A part of an algorithm from which features compute columns."""

    @property
    def provides(self) -> tuple[Column[Any], ...]: ...


def columns_read(parts: Iterable[object]) -> tuple[Column[Any], ...]:
    """All columns that these parts read, each once."""
    read = [column for part in parts if isinstance(part, ReadsColumns) for column in part.reads]
    return tuple(dict.fromkeys(read))


def columns_provided(parts: Iterable[object]) -> tuple[Column[Any], ...]:
    """All columns that these parts provide, each once."""
    provided = [c for part in parts if isinstance(part, ProvidesColumns) for c in part.provides]
    return tuple(dict.fromkeys(provided))


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same value with its tensors and kept tokens changed, in dataclasses and tuples."""
    if isinstance(value, Leaf):
        return change(value)
    if isinstance(value, tuple):
        parts = [changed(item, change) for item in value]
        return type(value)(*parts) if type(value) is not tuple else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        new = {f.name: changed(getattr(value, f.name), change) for f in fields(value) if f.init}
        return replace(value, **new)
    return value


def joined_values(parts: Sequence[Any]) -> Any:
    """Concatenate values of one structure, leaf by leaf; what is no tensor comes from the first."""
    leaves: list[list[Any]] = []
    for part in parts:
        row: list[Any] = []
        changed(part, lambda leaf, row=row: row.append(leaf) or leaf)
        leaves.append(row)
    joined = iter([joined_column(same) for same in zip(*leaves, strict=True)])
    return changed(parts[0], lambda _: next(joined))


def joined_tables(parts: Sequence[Table]) -> Table:
    """Concatenate tables with the same columns, in order."""
    first = parts[0]
    if len(parts) == 1 or not first.values:
        return first
    return Table(
        {
            key: value if key.form == "whole" else joined_values([part[key] for part in parts])
            for key, value in first.values.items()
        }
    )
