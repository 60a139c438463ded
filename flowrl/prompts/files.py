"""Read prompt files as rows: jsonl, json, csv, tsv, txt and parquet, with limits on their contents.

A row is a mapping with the same columns for every row; missing values are None.
"""

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, Field, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import yaml

from flowrl.bounded_files import bounded_bytes, bounded_text
from flowrl.errors import UserError
from flowrl.paths import find
from flowrl.prompts.parquet import check_parquet, parquet_columns, parquet_rows
from flowrl.prompts.prepared import prepared_fault, prepared_folder
from flowrl.prompts.source import DataSource, PromptRows, Row, Selection, check_column
from flowrl.prompts.table_limits import CELL, MOST_TABLE_BYTES, check_rows_fit, check_text_fits
from flowrl.prompts.unpacked import TooLarge, check_unpacked
from rewards.hub_names import names_repository
from rewards.perception.contents import file_unlike_its_name
from rewards.rights import NotGranted, Right, need, texts_in

# of a folder of `flowrl vote`: its log, its table, and the folder of the copied samples
EVENTS, VOTES_TABLE, VOTED_SAMPLES = "events.jsonl", "votes.jsonl", "samples"
_HUB_SECONDS = 5.0
_MOST_FILES = 5_000  # of a folder
_DESCRIPTIONS = ("README.md", ".huggingface.yaml")  # of a folder's data, which `datasets` reads
_MOST_DESCRIPTION = 2**22  # bytes
_MOST_COLUMNS = 1_000
_AT_ONCE = 1024  # rows of a data set whose size is summed at once
LINE_END = re.compile(r"\r\n|\r|\n")  # not those of str.splitlines, which are in prompts
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")  # JSON's
_EXACT_DIGITS = 15  # of a float; with more it would be another number
_PACKED = {".tar", ".tgz", ".gz", ".zip", ".zst", ".xz", ".bz2", ".7z", ".lz4"}
_TABLES_OF_DATASETS = ("json", "csv", "text", "parquet")  # its builders
_NO_HUB_NAME = {*_PACKED, ".yaml", ".yml", ".xlsx", ".arrow", ".py", ".md"}


class _Damage(Exception):
    """A clause about the error in a file."""


class _BadCells(ValueError):
    """A record that is not of CSV, with its line."""


class _TooManyCells(_BadCells):
    """A record with more cells than the first line has names."""


def read_rows(data: DataSource, place: str) -> PromptRows:
    """Read the chosen rows of a file, a folder or a hub data set. UserErrors begin with `place`."""
    source = data.source
    if not source.strip():
        raise UserError(f"{place}: the file name is empty")
    path = find(source)
    if path.exists():
        with _granted(place):
            need(Right.FILES, source, path=path)
    if path.is_file():
        if wrong := data.unused("config", "split", "revision", "unpacked"):
            raise UserError(f"{place}: {source} is a file, which has no {wrong}: leave it out")
        return data.selection.of(_file(path, data, place), f"{place}: {source}")
    if path.is_dir():
        if wrong := data.unused("config", "revision", "unpacked"):
            raise UserError(f"{place}: {source} is a folder, which has no {wrong}: leave it out")
        _check_folder(path, source, place)
        return _folder(path, data, place)
    if not on_hub(source):
        official = "; configs/papers/README.md lists where to get the official prompts"
        folder_hint = "" if path.is_absolute() else f"; paths are relative to {Path.cwd()}"
        hint = official if source.startswith("data/") else folder_hint
        raise UserError(f"{place}: no such file: {source}{hint}")
    return _dataset(source, data, place)


def on_hub(source: str) -> bool:
    """Whether a source is a hub data set's name, owner/name, rather than a file or folder."""
    suffix = Path(source).suffix.lower()
    if not names_repository(source) or suffix in {*READERS, *_NO_HUB_NAME}:
        return False
    return not find(source).exists()


def _file(path: Path, data: DataSource, place: str) -> PromptRows:
    rows = _raw(path, data.source, data.selection, place)
    return replace(rows, rows=_finished(rows.rows, [path], data, place))


def _raw(path: Path, source: str, selection: Selection, place: str) -> PromptRows:
    """The rows of a file as they stand there; `source` is its name in messages."""
    return table_in(path, f"{place}: {source}", selection)


def table_in(path: Path, at: str, selection: Selection = Selection()) -> PromptRows:
    """The rows of a file as they stand there, with their places. UserErrors begin with `at`."""
    suffix = path.suffix.lower()
    if suffix not in READERS:
        suffixes = ", ".join(READERS)
        way = "convert it to parquet, and " if suffix == ".arrow" else ""
        way = "unpack it, and " if suffix in _PACKED else way
        raise UserError(f"{at}: cannot read {path.suffix or 'it'}; {way}use one of {suffixes}")
    try:
        if path.stat().st_size > MOST_TABLE_BYTES:
            raise _Damage(f"more than {MOST_TABLE_BYTES // 2**20} MiB")
        if (damage := file_unlike_its_name(path)) is not None:
            raise _Damage(f"it {damage}")
        parquet = suffix == ".parquet"
        return _read_parquet(path, selection) if parquet else READERS[suffix](path)
    except _Damage as error:
        raise UserError(f"{at} cannot be read: {error}") from error
    except OSError as error:
        raise UserError(f"{at} cannot be read: {_short(error)}") from error


def _finished(
    rows: Sequence[Row], files: Sequence[Path], data: DataSource, place: str
) -> Sequence[Row]:
    """The rows of files with the same columns, and with numbers where the files are CSV."""
    rows = _same_columns(rows, data.source, place)
    if all(file.suffix.lower() in (".csv", ".tsv") for file in files):
        for name in set(rows[0] if rows else ()) - {data.column}:
            _convert(rows, name)
    return rows


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _same_columns(rows: Sequence[Row], source: str, place: str) -> Sequence[Row]:
    columns = dict.fromkeys(name for row in rows for name in row)
    if len(columns) > _MOST_COLUMNS:
        raise UserError(f"{place}: {source} has more than {_MOST_COLUMNS} columns")
    if all(len(row) == len(columns) for row in rows):
        return rows
    return [{name: row.get(name) for name in columns} for row in rows]


def utf8_text(data: bytes) -> str:
    """Decode a file, with or without a byte order mark. ValueError names the line that is not
    UTF-8, as in files of older Windows programs."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = len(LINE_END.split(data[: error.start].decode("latin-1")))
        raise ValueError(f"line {line} is not UTF-8; save the file as UTF-8") from error


def _text(path: Path) -> str:
    try:
        content = bounded_bytes(path, MOST_TABLE_BYTES)
        check_text_fits(content)
        return utf8_text(content)
    except ValueError as error:
        raise _Damage(str(error)) from error


def _lines(text: str) -> Iterable[tuple[str, str]]:
    """Lines with their places, with the ends of lines of any system. Blank lines are skipped."""
    for number, line in enumerate(LINE_END.split(text), 1):
        if line.strip():
            yield f"line {number}", line


def one_value_per_key(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. ValueError for a key that occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice: keep one of them")
    return fields


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=one_value_per_key)
    except RecursionError as error:
        raise _Damage(f"{place}lists and mappings are nested too deep") from error
    except ValueError as error:
        raise _Damage(f"{place}not valid JSON ({_json_fault(error, place)})") from error


def _json_fault(error: ValueError, place: str) -> str:
    """The fault of a JSON text; in a line of a file, whose number `place` says, without a number of
    its own."""
    if not isinstance(error, json.JSONDecodeError):
        return _short(error)
    line = "" if place else f"line {error.lineno}, "
    return f"{error.msg}: {line}column {error.colno}"


def _object(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a text", type(None): "null"}.get(type(value), "a number")
        raise _Damage(
            f'{place}: expected an object such as {{"prompt": "a red circle"}}, not {kind}'
        )
    return value


def _read_jsonl(path: Path) -> PromptRows:
    return _json_lines(_text(path))


def _json_lines(text: str) -> PromptRows:
    if text.lstrip()[:1] == "[":
        raise _Damage("it is one list, not an object per line: name it .json")
    pairs = [(_object(_json(line, f"{at}: "), at), at) for at, line in _lines(text)]
    return PromptRows([row for row, _ in pairs], [at for _, at in pairs])


def _read_json(path: Path) -> PromptRows:
    """A list of objects, an object of columns, or an object per line."""
    text = _text(path)
    if not text.strip():
        return PromptRows([], [])
    try:
        value = _json(text, "")
    except _Damage:
        first = next(iter(_lines(text)))[1]
        if first.lstrip()[:1] == "{" and first.rstrip()[-1:] == "}" and "\n" in text.strip():
            return _json_lines(text)
        raise
    if isinstance(value, dict) and value and all(isinstance(c, list) for c in value.values()):
        lengths = {name: len(column) for name, column in value.items()}
        if len(set(lengths.values())) > 1:
            raise _Damage(f"its columns have different lengths: {lengths}"[:200])
        rows = [dict(zip(value, cells, strict=True)) for cells in zip(*value.values(), strict=True)]
    elif isinstance(value, dict):
        rows = [value] if value else []
    elif isinstance(value, list):
        rows = [_object(row, f"row {i}") for i, row in enumerate(value, 1)]
    else:
        raise _Damage("expected a list of objects")
    return PromptRows(rows, [f"row {i}" for i in range(1, len(rows) + 1)])


def _read_txt(path: Path) -> PromptRows:
    pairs = list(_lines(_text(path)))
    return PromptRows([{"text": line} for _, line in pairs], [at for at, _ in pairs])


def cell_rows(text: str, comma: str) -> PromptRows:
    """The rows of a table whose cells are separated by `comma`, below their names.

    A table of tabs whose quotes are not those of CSV has none: each line is a row, and quotes
    belong to its texts, as in PartiPrompts.tsv. ValueError for a table that cannot be read."""
    before = csv.field_size_limit(MOST_TABLE_BYTES)  # the file's own limit; csv's is 131072 letters
    try:
        return _separated(text, comma)
    finally:
        csv.field_size_limit(before)


def _separated(text: str, comma: str) -> PromptRows:
    try:
        return _cell_rows(text, comma, csv.QUOTE_MINIMAL)
    except _BadCells as error:
        if comma == "\t" and not isinstance(error, _TooManyCells):
            return _cell_rows(text, comma, csv.QUOTE_NONE)
        names = text.partition("\n")[0]
        other = next((mark for mark in ";\t|" if names.count(mark) > names.count(comma)), None)
        if other is not None:
            raise ValueError(
                f"its cells are separated by {other!r}: save it with commas, or as jsonl"
            ) from error
        raise ValueError(str(error)) from error


def _cell_rows(text: str, comma: str, quoting: Literal[0, 3]) -> PromptRows:
    rows: list[Row] = []
    places: list[str] = []
    lines = io.StringIO(text, newline="")
    reader = csv.DictReader(lines, delimiter=comma, quoting=quoting, strict=True)
    try:
        names = [name for name in reader.fieldnames or () if name]
    except csv.Error as error:
        raise _BadCells(f"line 1: not valid CSV ({_short(error)})") from error
    if len(set(names)) < len(names):
        raise ValueError("two columns have the same name")
    for cells in _records(reader):
        if any(cells.pop(None, ())):  # type: ignore[call-overload] cells without a column
            raise _TooManyCells(f"line {reader.line_num}: more cells than columns")
        rows.append(dict(cells))
        places.append(f"line {reader.line_num}")
    return PromptRows(rows, places)


def _records(reader: "csv.DictReader[str]") -> Iterator[dict[str, Any]]:
    """The records of a table. _BadCells names the line at which one begins that has no end."""
    while True:
        begin = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise _BadCells(f"line {begin}: not valid CSV ({_short(error)})") from error
        yield cells


def _read_cells(path: Path, comma: str) -> PromptRows:
    try:
        return cell_rows(_text(path), comma)
    except ValueError as error:
        raise _Damage(_short(error)) from error


def _convert(rows: Sequence[Row], name: str) -> None:
    """Convert a CSV column to numbers or booleans if all of its cells are, as JSON writes them, so
    that 007 stays a text; empty cells become None."""
    cells = [row[name] or None for row in rows]
    values_given = [cell for cell in cells if cell is not None]
    for convert in (_boolean, _number):
        try:
            values = [convert(cell) for cell in values_given]
        except (ValueError, OverflowError):
            continue
        converted = iter(values)
        cells = [None if cell is None else next(converted) for cell in cells]
        break
    for row, cell in zip(rows, cells, strict=True):
        row[name] = cell


def _boolean(cell: str) -> bool:
    if cell.lower() not in ("true", "false"):
        raise ValueError(cell)
    return cell.lower() == "true"


def _number(cell: str) -> int | float:
    """A number as JSON reads it: 7 stays whole beside 0.5."""
    return _float(cell) if set(cell) & {*".eE"} else _integer(cell)


def _integer(cell: str) -> int:
    if not _NUMBER.fullmatch(cell):
        raise ValueError(cell)
    return int(cell)


def _float(cell: str) -> float:
    digits = re.split("[eE]", cell)[0].replace("-", "").replace(".", "").strip("0")
    if not _NUMBER.fullmatch(cell) or len(digits) > _EXACT_DIGITS:
        raise ValueError(cell)
    return float(cell)


def _read_parquet(path: Path, selection: Selection = Selection()) -> PromptRows:
    """The rows of a parquet file, of which only the columns that the selection uses are read."""
    try:
        wanted = None
        if selection.keep is not None:
            names = parquet_columns(path)
            used = (*selection.keep, *selection.where)
            if all(any(_is_in(column, name) for name in names) for column in used):
                wanted = [name for name in names if any(_is_in(column, name) for column in used)]
        rows = parquet_rows(path, wanted)
    except ValueError as error:
        raise _Damage(_short(error)) from error
    return PromptRows(rows, [f"row {i}" for i in range(1, len(rows) + 1)])


def _is_in(column: str, name: str) -> bool:
    """Whether a column, which may be nested, belongs to the one with this name."""
    return column == name or column.startswith(name + ".")


READERS: dict[str, Callable[[Path], PromptRows]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".txt": _read_txt,
    ".csv": partial(_read_cells, comma=","),
    ".tsv": partial(_read_cells, comma="\t"),
    ".parquet": _read_parquet,
}


def _check_folder(folder: Path, source: str, place: str) -> None:
    """UserError for a folder that is not a data set: without tables, with too many files, or with a
    table that is not what its name says."""
    count, tables = 0, list[Path]()
    for inner, folders, names in os.walk(folder):
        count += len(names)
        with _granted(place):
            for path in (Path(inner) / name for name in (*folders, *names)):
                if path.is_symlink():
                    need(Right.FILES, str(path), f"{path}, a link out of the folder,", path)
        tables += [Path(inner) / name for name in names if Path(name).suffix in READERS]
        if count > _MOST_FILES:
            raise UserError(
                f"{place}: {source} has more than {_MOST_FILES} files: give the prompt file itself"
            )
    if not tables:
        raise UserError(f"{place}: {source} is a folder without {', '.join(READERS)} files")
    for table in sorted(tables):
        try:
            damage = file_unlike_its_name(table)
        except OSError as error:
            raise UserError(f"{place}: {table} cannot be read: {_short(error)}") from error
        if damage is not None:
            raise UserError(f"{place}: {table} cannot be read: it {damage}")


def _folder(folder: Path, data: DataSource, place: str) -> PromptRows:
    """The chosen rows of a folder. `datasets` says which files make its splits; tables are read as
    single files are, and only other forms, such as images beside their texts, by `datasets`."""
    from datasets import load_dataset_builder  # slow to import

    at = f"{place}: {data.source}"
    check_not_arrow(folder, at, data.split or "train")
    check_not_votes(folder, at)
    with _reading(at, ""), TemporaryDirectory() as cache:
        with _granted(place):
            for text in _described(folder):
                _check_place(text, folder)
        builder = load_dataset_builder(str(folder), cache_dir=cache)
        splits = _files_of(builder)
    if not _as_files(builder):
        for file in sorted({file for files in splits.values() for file in files}):
            _check_other(file, place)
        return _dataset(str(folder), data, place)
    split = data.split or "train"
    pieces = _pieces(split, splits, at, lambda name: _joined(splits[name], folder, data, place))
    table = _concatenated(pieces)
    files = [file for names in splits.values() for file in names]
    return data.selection.of(replace(table, rows=_finished(table.rows, files, data, place)), at)


def _described(folder: Path) -> Iterator[str]:
    """The places of files that a folder's own description gives (`configs` of its README and of
    .huggingface.yaml), which `datasets` follows wherever they lead. ValueError for a description
    that cannot be read."""
    from huggingface_hub import DatasetCard

    for name in _DESCRIPTIONS:
        if not (folder / name).is_file():
            continue
        text = bounded_text(folder / name, _MOST_DESCRIPTION)
        if name.endswith(".md"):
            tree = DatasetCard(text, ignore_metadata_errors=True).data.to_dict()
        else:
            tree = yaml.safe_load(text)
        configs = tree.get("configs") if isinstance(tree, Mapping) else None
        for config in configs if isinstance(configs, list) else ():
            if isinstance(config, Mapping):
                yield from texts_in([config.get("data_files"), config.get("data_dir")])


def _check_place(text: str, folder: Path) -> None:
    """NotGranted for a place that a folder may not name: an address, also of a file within an
    archive (`zip://a::http://b`), or a file outside."""
    if "://" in text or "::" in text:
        need(Right.NETWORK, text, f"{text}, which {folder} gives as a place of its data,")
    else:
        need(
            Right.FILES,
            text,
            f"{text}, which {folder} gives as a place of its data,",
            folder / text,
        )


def _check_on_hub(builder: Any, place: str) -> None:
    """ValueError for a data set of the hub whose description names a file of this machine, and
    UserError for one that names another address in a folder without the right to it."""
    for files in (builder.config.data_files or {}).values():
        for file in map(str, files):
            if "://" not in file or "::" in file or file.startswith("file:"):
                raise ValueError(f"it names {file}, which is no file of its own")
            if not file.startswith("hf://"):
                with _granted(place):
                    need(Right.NETWORK, file)


@contextmanager
def _granted(place: str) -> Iterator[None]:
    try:
        yield
    except NotGranted as error:
        raise UserError(f"{place}: {error}") from error


def check_not_arrow(folder: Path, at: str, split: str = "train") -> None:
    """UserError, beginning with `at`, for a folder that `datasets` has written by save_to_disk. Of
    several splits it names `split`, or the first if there is no such split."""
    several = (folder / "dataset_dict.json").is_file()
    if several or (folder / "state.json").is_file():
        # a dictionary has a folder for each split
        names = sorted(part.parent.name for part in folder.glob("*/state.json"))
        name = split if split in names or not names else names[0]
        part, file = (f"[{name!r}]", f"{name}.parquet") if several else ("", "train.parquet")
        raise UserError(
            f"{at} was written by save_to_disk, as Arrow files: make a parquet file of it, with "
            f"`datasets.load_from_disk(FOLDER){part}.to_parquet({file!r})`"
        )


def check_not_votes(folder: Path, at: str) -> None:
    """UserError, beginning with `at`, for a folder of `flowrl vote`, whose other files are no
    tables of the user."""
    if (folder / EVENTS).is_file():
        way = f"name its table, {folder / VOTES_TABLE}"
        if not (folder / VOTES_TABLE).is_file():
            way = f"`flowrl vote {folder} --results` makes its table, {VOTES_TABLE}"
        raise UserError(f"{at} is a folder of votes: {way}")


def folders_of_votes(folder: Path) -> list[Path]:
    """Folders of votes in a folder, and in its folders `ask` and `votes`, where a run has them."""
    logs = (log for where in ("", "ask/", "votes/") for log in folder.glob(f"{where}*/{EVENTS}"))
    return [log.parent for log in sorted(logs)]


def _files_of(builder: Any) -> dict[str, list[Path]]:
    """The files of each split, by a builder of `datasets`."""
    files: Mapping[Any, Iterable[Any]] = builder.config.data_files or {}
    return {str(name): [Path(str(file)) for file in paths] for name, paths in files.items()}


def _as_files(builder: Any) -> bool:
    """Whether the files of a builder are tables, without settings that its README gives them."""
    if builder.name not in _TABLES_OF_DATASETS:
        return False
    about = {"name", "version", "data_dir", "data_files", "description"}
    changed = {
        field.name
        for field in fields(builder.config)
        if field.name not in about and getattr(builder.config, field.name) != _default(field)
    }
    suffixes = {file.suffix.lower() for files in _files_of(builder).values() for file in files}
    return changed <= ({"sep"} if suffixes == {".tsv"} else set())


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _joined(files: Sequence[Path], folder: Path, data: DataSource, place: str) -> PromptRows:
    """The rows of several files, one after the other; each is a file of its own in messages."""
    tables = list[PromptRows]()
    for file in files:
        name = Path(os.path.relpath(file, folder)).as_posix()
        rows = _raw(file, f"{data.source}/{name}", data.selection, place)
        places = [f"{name}, {row}" for row in rows.places]
        tables.append(PromptRows(rows.rows, places, [file.parent] * len(places)))
    return _concatenated(tables)


def _concatenated(tables: Sequence[PromptRows]) -> PromptRows:
    return PromptRows(
        [row for table in tables for row in table.rows],
        [place for table in tables for place in table.places],
        [folder for table in tables for folder in table.folders],
    )


def _pieces(
    split: str, names: Iterable[str], at: str, read: Callable[[str], PromptRows]
) -> list[PromptRows]:
    """The rows of a split, or of a sum of parts of splits, such as "train[:100]+test". UserError
    for a split that is not there."""
    from datasets import ReadInstruction

    names = list(names)
    if split in names:
        return [read(split)]
    if split == "all":
        return [read(name) for name in names]
    mentioned = [re.split(r"[\[(]", part.strip())[0] for part in split.split("+")]
    if absent := [name for name in mentioned if name not in names]:
        raise UserError(f"{at} has no split {absent[0]!r}; it has {', '.join(names)}")
    tables = {name: read(name) for name in dict.fromkeys(mentioned)}
    lengths: Any = {name: len(table.rows) for name, table in tables.items()}
    try:
        parts: Any = ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise UserError(f"{at}: the split {split!r} cannot be read: {_short(error)}") from error
    pieces = list[PromptRows]()
    for part in parts:
        table, chosen = tables[part.splitname], range(part.from_, part.to)
        pieces.append(table.taken([table.rows[i] for i in chosen], chosen))
    return pieces


def _check_other(file: Path, place: str) -> None:
    """UserError for a file of a folder that `datasets` would unpack without a limit."""
    suffix = file.suffix.lower()
    way = {".arrow": "is an Arrow file: convert it to parquet"} | dict.fromkeys(
        _PACKED, "is an archive: unpack it, and give the folder of what it holds"
    )
    if suffix in way:
        raise UserError(f"{place}: {file} {way[suffix]}")
    if suffix not in READERS:
        return
    if suffix != ".parquet" and file.stat().st_size > MOST_TABLE_BYTES:
        raise UserError(f"{place}: {file} has more than {MOST_TABLE_BYTES // 2**20} MiB")
    if suffix == ".parquet":
        try:
            check_parquet(file)
        except ValueError as error:
            raise UserError(f"{place}: {file} cannot be read: {_short(error)}") from error


def _dataset(name: str, data: DataSource, place: str) -> PromptRows:
    """The chosen rows of a folder or a hub data set, read by `datasets`."""
    from datasets import load_dataset  # slow to import

    from rewards.perception.hub_cache import CachedRepository

    at = f"{place}: {data.source}"
    command = CachedRepository(name, "dataset", revision=data.revision).command()
    way = f"; run {command} on a machine with a network"
    # the cache recognizes a file by its time alone, and two runs may start at once
    on_hub = "" if Path(name).is_dir() else name
    with _reading(at, way if on_hub else "", on_hub), TemporaryDirectory() as cache:
        if not Path(name).is_dir():
            if (snapshot := _downloaded_alone(name, data, at, way)) is not None:
                _check_downloaded(snapshot, data, at, cache)
                return _dataset(str(snapshot), data, place)
            _check_hub(name, data, at)
        data_set: Any = load_dataset(
            name,
            data.config,
            split=data.split or "train",
            revision=data.revision,
            cache_dir=cache if Path(name).is_dir() else None,
        )
        return _rows_of(data_set, data, at)


def _downloaded_alone(name: str, data: DataSource, at: str, way: str) -> Path | None:
    """The folder of a hub data set that `hf download` has put into the hub's cache, if nobody
    answers within seconds and `datasets`, which would ask again for minutes and does not look
    there, has not prepared it; None if the hub answers, or it is prepared. UserError, beginning
    with `at` and ending with `way`, if neither is so and it is not there. What the hub answers is
    left to its reading."""
    from huggingface_hub import HfApi

    from rewards.perception.hub import answer_of_hub, of_network
    from rewards.perception.hub_cache import CachedRepository

    if prepared_folder(name).is_dir():
        return None
    try:
        HfApi().dataset_info(name, timeout=_HUB_SECONDS)
    except Exception as error:  # whatever the installed HTTP library raises
        if not of_network(error):
            raise
        if answer_of_hub(error, name) is not None:
            return None
        repository = CachedRepository(name, "dataset", whole=True, revision=data.revision)
        if (fault := repository.fault()) is not None:
            raise UserError(f"{at} cannot be read: {fault.words}") from error
        folder = repository.snapshot()
        if isinstance(folder, Path):
            return folder
        reason = f"the hub cannot be reached: {type(error).__name__}: {_short(error)}"
        raise UserError(f"{at} cannot be read ({reason}){way}") from error
    return None


def _check_downloaded(folder: Path, data: DataSource, at: str, cache: str) -> None:
    """`_check_hub` of a downloaded data set: its description may name no file but its own."""
    from datasets import load_dataset_builder

    for text in _described(folder):
        inside = Path(os.path.normpath(folder / text)).is_relative_to(folder)
        if "://" in text or "::" in text or not inside:
            raise ValueError(f"it names {text}, which is no file of its own")
    builder = load_dataset_builder(str(folder), data.config, cache_dir=cache)
    try:
        check_unpacked(
            [path for files in _files_of(builder).values() for path in files], data.unpacked
        )
    except TooLarge as error:
        raise UserError(f"{at}: {error}") from error


def _check_hub(name: str, data: DataSource, at: str) -> None:
    """UserError, beginning with `at`, for a hub data set that names places of others (see
    `_check_on_hub`), or whose files unpack to more than it may take. The files are downloaded as
    `datasets` itself will, once; one that it has unpacked before is not asked again."""
    from datasets import DownloadManager, load_dataset_builder

    builder = load_dataset_builder(name, data.config, revision=data.revision)
    _check_on_hub(builder, at)
    if Path(builder.cache_dir).is_dir():
        return
    files: Mapping[Any, Sequence[str]] = builder.config.data_files or {}
    places = [str(place) for named in files.values() for place in named]
    paths = [Path(path) for path in DownloadManager(dataset_name=name).download(places)]
    try:
        check_unpacked(paths, data.unpacked)
    except TooLarge as error:
        raise UserError(f"{at}: {error}") from error


@contextmanager
def _reading(at: str, way: str, on_hub: str = "") -> Iterator[None]:
    """Turn the errors of `datasets` into UserErrors that begin with `at` and end with `way`, or
    with what the hub has answered for the data set `on_hub`, and silence its bars."""
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from httpx import HTTPError

    from rewards.perception.hub import answer_of_hub, token_fault, waiting
    from rewards.perception.hub_cache import CachedRepository

    # of the library, its files' readers, the hub's client and file systems that are not installed
    errors = (DatasetsError, HTTPError, OSError, ValueError, TypeError, KeyError, yaml.YAMLError)
    repository = CachedRepository(on_hub, "dataset")
    try:
        with _no_progress_bars(), waiting(on_hub) if on_hub else nullcontext():
            yield
    except UserError:
        raise
    except (*errors, RuntimeError, ImportError) as error:
        if on_hub and (fault := prepared_fault(on_hub, error)) is not None:
            raise UserError(f"{at} cannot be read: {fault}") from error
        if on_hub and (raised := repository.raised(error)) is not None:
            raise UserError(f"{at} cannot be read: {raised}") from error
        if on_hub and (obstacle := token_fault()) is not None:
            raise UserError(f"{at} cannot be read: the hub {obstacle}") from error
        if on_hub and (answer := answer_of_hub(error, on_hub)) is not None:
            raise UserError(f"{at} cannot be read: {answer}") from error
        if isinstance(error, DatasetNotFoundError):
            raise UserError(
                f"{at} cannot be read: {_short(error)}: check the name, or accept its licence on "
                "the hub and log in (hf auth login)"
            ) from error
        raise UserError(f"{at} cannot be read: {_short(error)}{way}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Silence the bars of `datasets`; the caller's switch is restored."""
    from datasets import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()


def _rows_of(data_set: Any, data: DataSource, at: str) -> PromptRows:
    """The chosen rows of a `datasets.Dataset`; only these are loaded into memory."""
    select = data.selection
    if select.where:
        for name in select.columns_read:
            if name not in data_set.column_names:
                check_column([dict.fromkeys(data_set.column_names)], name, at, "where")
        chosen = select.indices(data_set.select_columns(select.columns_read).to_list(), at)
    else:
        chosen = select.indices([{}] * len(data_set), at)
    if select.keep is not None:
        tops = dict.fromkeys(name.partition(".")[0] for name in select.keep)
        data_set = data_set.select_columns([name for name in tops if name in data_set.column_names])
    chosen_rows, size = data_set.select(chosen), 0
    if data_set.data.nbytes > MOST_TABLE_BYTES:
        for batch in chosen_rows.with_format("arrow").iter(_AT_ONCE):
            size += batch.nbytes + CELL * batch.num_columns * batch.num_rows
        check_rows_fit(size)
    table = PromptRows(chosen_rows.to_list(), [f"row {i + 1}" for i in chosen])
    return Selection(keep=select.keep).of(table, at)
