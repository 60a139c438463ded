"""Read tables from files as lists of mappings: jsonl, json, csv, tsv and parquet. Cells stay as
stored (bytes of images are not decoded, and numbers in a CSV are texts)."""

from codecs import BOM_UTF8
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.prompts.files import READERS, check_not_arrow, check_not_votes, table_in
from flowrl.prompts.source import PromptRows, Row

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def table_of(source: Path) -> tuple[PromptRows, Path]:
    """Read the rows of a file, or of all parquet files (or the only table) of a folder, each with
    its place, such as "line 3"; also returns the folder to which their paths are relative.
    UserError names the file and the problem."""
    if source.is_dir():
        check_not_arrow(source, str(source))
        check_not_votes(source, str(source))
        files = sorted(source.glob("*.parquet")) or sorted(
            path for path in source.iterdir() if path.suffix.lower() in SUFFIXES
        )
        if not files:
            raise UserError(f"{source}: no table in this folder ({', '.join(SUFFIXES)})")
        if len(files) > 1 and files[0].suffix != ".parquet":
            names = ", ".join(path.name for path in files)
            raise UserError(f"{source}: several tables ({names}): name one, such as {files[0]}")
        tables = [(path.name, _table(path)) for path in files]
        rows = [row for _, table in tables for row in table.rows]
        return PromptRows(rows, [f"{n}, {p}" for n, table in tables for p in table.places]), source
    if not source.is_file():
        raise UserError(f"{source}: no such file or folder")
    return _table(source), source.parent


def rows_of(source: Path) -> tuple[list[Row], Path]:
    """The rows of `table_of` without their places."""
    table, folder = table_of(source)
    return list(table.rows), folder


def _table(path: Path) -> PromptRows:
    suffix = path.suffix.lower()
    if suffix in READERS and suffix not in SUFFIXES:
        raise UserError(f"{path}: cannot read {path.suffix!r}; use one of {', '.join(SUFFIXES)}")
    table = table_in(path, str(path))
    if suffix == ".json" and _is_object(path):
        table = _only_table(table)
    if not table.rows:
        raise UserError(f"{path} has no rows")
    return table


def _is_object(path: Path) -> bool:
    """Whether a file of JSON is an object rather than a list."""
    with path.open("rb") as file:
        return file.read(256).removeprefix(BOM_UTF8).lstrip().startswith(b"{")


def _only_table(table: PromptRows) -> PromptRows:
    """The table inside an object, such as {"pairs": [...]}: its only list of objects. The reader of
    JSON takes an object of lists for columns, and another for a row."""
    names = list(table.rows[0]) if table.rows else []
    if len(names) == 1 and all(isinstance(row.get(names[0]), dict) for row in table.rows):
        inner = [row[names[0]] for row in table.rows]
    elif len(table.rows) == 1:
        tables = [value for value in table.rows[0].values() if _is_table(value)]
        inner = tables[0] if len(tables) == 1 and len(names) > 1 else []
    else:
        inner = []
    return PromptRows(inner, [f"row {i}" for i in range(1, len(inner) + 1)]) if inner else table


def _is_table(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)
    )
