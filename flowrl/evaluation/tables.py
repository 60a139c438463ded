"""Read tables from files as a list of mappings: jsonl, json, csv, tsv and parquet. Cells stay as
stored (bytes of images are not decoded)."""

import json
from pathlib import Path
from typing import Any

from flowrl.bounded_files import bounded_bytes
from flowrl.errors import UserError
from flowrl.prompts.files import (
    LINE_END,
    cell_rows,
    one_value_per_key,
    utf8_text,
)
from flowrl.prompts.parquet import parquet_rows
from flowrl.prompts.table_limits import MOST_TABLE_BYTES, check_text_fits
from rewards.perception.contents import file_unlike_its_name

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


def rows_of(source: Path) -> tuple[list[dict[str, Any]], Path]:
    """Read the rows of a file, or of all parquet files (or the only table) of a folder; also
    returns the folder to which their paths are relative. UserError names the file and the
    problem."""
    if source.is_dir():
        files = sorted(source.glob("*.parquet")) or sorted(
            path for path in source.iterdir() if path.suffix.lower() in SUFFIXES
        )
        if not files:
            raise UserError(f"{source}: no table in this folder ({', '.join(SUFFIXES)})")
        if len(files) > 1 and files[0].suffix != ".parquet":
            names = ", ".join(path.name for path in files)
            raise UserError(f"{source}: several tables ({names}); choose one of them")
        return [row for path in files for row in _rows(path)], source
    if not source.is_file():
        raise UserError(f"{source}: no such file or folder")
    return _rows(source), source.parent


def _rows(path: Path) -> list[dict[str, Any]]:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"{path}: cannot read {path.suffix!r}; use one of {', '.join(SUFFIXES)}")
    if (mismatch := file_unlike_its_name(path)) is not None:
        raise UserError(f"{path} cannot be read: it {mismatch}")
    try:
        rows = parquet_rows(path) if suffix == ".parquet" else _text(path, suffix)
    except (ValueError, RecursionError, OSError) as error:  # those of json and of the decoder too
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: no rows with named columns")
    return rows


def _text(path: Path, suffix: str) -> list[dict[str, Any]]:
    content = bounded_bytes(path, MOST_TABLE_BYTES)
    check_text_fits(content)
    text = utf8_text(content)
    if suffix in (".csv", ".tsv"):
        return list(cell_rows(text, "\t" if suffix == ".tsv" else ",").rows)
    if suffix == ".json":
        content = json.loads(text, object_pairs_hook=one_value_per_key)
        return _only_list(content) if isinstance(content, dict) else content
    rows = []
    for i, line in enumerate(LINE_END.split(text)):
        try:
            row = [json.loads(line, object_pairs_hook=one_value_per_key)] if line.strip() else []
            rows.extend(row)
        except ValueError as error:
            raise ValueError(f"line {i + 1}: {error}") from error
    return rows


def _only_list(content: dict[str, Any]) -> list[Any]:
    """The table inside an object, such as {"pairs": [...]}; empty unless it is the only list of
    objects."""
    tables = [
        value
        for value in content.values()
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value)
    ]
    return tables[0] if len(tables) == 1 else []
