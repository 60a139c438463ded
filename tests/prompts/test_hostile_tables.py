"""Tables of a few kB whose rows would fill the memory, at every door through which a table is read:
refused before memory is taken."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from flowrl.errors import UserError
from flowrl.evaluation.preferences import ReadOptions, load_preferences
from flowrl.evaluation.tables import rows_of
from flowrl.prompts import files as reader
from flowrl.prompts import parquet as parquet_reader
from flowrl.prompts import table_limits
from flowrl.prompts.parquet_pages import DAMAGED
from flowrl.prompts.source import DataSource, Selection
from tests.support import fuzz

ROWS, LARGE = 1000, "x" * 3_000_000  # 3 GB once unpacked
LIST = 2_000_000
MOST_HELD = 2**25  # bytes: what is refused by its counts is not unpacked first
# smaller limits, so that files above them are written soon
LIMITS = {
    "rows_without_columns": {"MOST_TABLE_ROWS": 10_000},
    "a_group_of_more_rows_than_the_header_says": {"MOST_TABLE_ROWS": 10_000},
    "groups_of_more_rows_together": {"MOST_TABLE_ROWS": 10_000},
    "a_long_list": {"MOST_CELLS": 1_000_000},
    "a_list_whose_header_lies": {"MOST_CELLS": 1_000_000},
    "wide_values": {"MOST_TABLE_BYTES": 2**26},
}


def equal_texts() -> Any:
    indices = pyarrow.array([0] * ROWS, pyarrow.int32())
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([LARGE]))


def one_list(length: int) -> Any:
    offsets = pyarrow.array([0, length], pyarrow.int32())
    return pyarrow.ListArray.from_arrays(offsets, pyarrow.nulls(length))


def write(column: Any) -> Callable[[Path], object]:
    def put(file: Path) -> None:
        table = pyarrow.table({"prompt": ["a"] * len(column), "more": column})
        parquet.write_table(table, file, compression="zstd", write_statistics=False)

    return put


def texts(file: Path) -> None:
    write(equal_texts())(file)


def texts_in_structs(file: Path) -> None:
    write(pyarrow.StructArray.from_arrays([equal_texts()], ["bytes"]))(file)


def texts_in_lists(file: Path) -> None:
    write(
        pyarrow.ListArray.from_arrays(
            pyarrow.array(range(ROWS + 1), pyarrow.int32()), equal_texts()
        )
    )(file)


def a_long_list(file: Path) -> None:
    write(one_list(LIST))(file)


def varint(number: int, length: int = 0) -> bytes:
    """Thrift's form of a number, with bytes that say nothing up to a length."""
    number, content = number << 1 ^ number >> 63, list[int]()
    while number or len(content) < length:
        content.append(number & 127 | 128)
        number >>= 7
    return bytes([*content[:-1], content[-1] & 127])


def a_list_whose_header_lies(file: Path) -> None:
    """The counts of the footer are changed from those of its pages to one."""
    content = (file.parent / "a_long_list.parquet").read_bytes()
    begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    true = varint(LIST)
    footer = content[begin:-8]
    assert true in footer
    file.write_bytes(content[:begin] + footer.replace(true, varint(1, len(true))) + content[-8:])


def wide_values(file: Path) -> None:
    value = pyarrow.array([bytes(3_000_000)], pyarrow.binary(3_000_000))
    write(value.take(pyarrow.array([0] * 30)))(file)


def no_columns(rows: int, of_group: int, groups: int) -> bytes:
    """A parquet file of a footer alone: a schema without columns, and counts of rows."""
    group = b"\x19\x0c\x16\x00\x16" + varint(of_group) + b"\x00"
    footer = b"\x15\x04\x19\x1c\x48\x06schema\x15\x00\x00\x16" + varint(rows)
    footer += bytes([0x19, groups << 4 | 12]) + group * groups + b"\x00"
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def rows_without_columns(file: Path) -> None:
    file.write_bytes(no_columns(20_000, 20_000, 1))


def a_group_of_more_rows_than_the_header_says(file: Path) -> None:
    file.write_bytes(no_columns(1, 20_000, 1))


def groups_of_more_rows_together(file: Path) -> None:
    file.write_bytes(no_columns(1, 7_000, 2))


HOSTILE = (
    rows_without_columns,
    a_group_of_more_rows_than_the_header_says,
    groups_of_more_rows_together,
    texts,
    texts_in_structs,
    texts_in_lists,
    a_long_list,
    a_list_whose_header_lies,
    wide_values,
)


def as_file(path: Path) -> object:
    return reader.read_rows(DataSource(str(path)), "prompts.train")


def as_folder(path: Path) -> object:
    return reader.read_rows(DataSource(str(path.parent)), "prompts.train")


def as_kept_column(path: Path) -> object:
    data = DataSource(str(path), selection=Selection(keep=("prompt", "more")))
    return reader.read_rows(data, "prompts.train")


def as_images(path: Path) -> object:
    """A folder that `datasets` itself reads: the table is that of its images."""
    path.rename(path.with_name("metadata.parquet"))
    for name in ("a.png", "b.png", "c.png"):
        path.with_name(name).write_bytes(b"")
    return as_folder(path)


def as_preferences(path: Path) -> object:
    return load_preferences(path, ReadOptions())


DOORS = (as_file, as_folder, as_kept_column, as_images)
DOORS += (rows_of, lambda path: rows_of(path.parent), as_preferences)


@contextmanager
def held() -> Iterator[Any]:
    """A pool that counts what pyarrow itself takes, from nothing."""
    before = pyarrow.default_memory_pool()
    pool = pyarrow.proxy_memory_pool(before)
    pyarrow.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pyarrow.set_memory_pool(before)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("hostile")
    for put in HOSTILE:
        put(place / f"{put.__name__}.parquet")
    return {put.__name__: place / f"{put.__name__}.parquet" for put in HOSTILE}


@pytest.mark.parametrize("name", [put.__name__ for put in HOSTILE])
def test_every_door_refuses_a_small_file_with_large_contents(
    name: str, hostile: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, value in LIMITS.get(name, {}).items():
        monkeypatch.setattr(parquet_reader, limit, value)
    assert hostile[name].stat().st_size < 2**20
    for index, door in enumerate(DOORS):
        file = tmp_path / str(index) / "train.parquet"
        file.parent.mkdir()
        file.write_bytes(hostile[name].read_bytes())
        refused = pytest.raises(UserError, match=r"more than .* (once unpacked|cells|rows)")
        with fuzz.watched(), held() as pool, refused:
            door(file)
        assert pool.max_memory() < MOST_HELD


def test_a_table_of_many_small_values_is_held_against_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_limits, "_SMALL", 0)
    monkeypatch.setattr(table_limits, "_SHARE", 1e-9)
    column = pyarrow.array([7] * 100)
    parquet.write_table(pyarrow.table({"prompt": ["a"] * 100, "n": column}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n' * 100)
    (tmp_path / "a.csv").write_text("prompt,n\n" + "a,1\n" * 100)
    for name in ("a.parquet", "a.jsonl", "a.csv"):
        for door in (as_file, rows_of):
            with pytest.raises(
                UserError, match=f"{name} cannot be read: its rows would take about"
            ):
                door(tmp_path / name)
    for name in ("a.parquet", "a.csv"):
        (tmp_path / name).unlink()
    with pytest.raises(UserError, match=r"a\.jsonl cannot be read: its rows would take about"):
        as_folder(tmp_path / "a.jsonl")


@pytest.mark.parametrize("counts", [(-1, 5, 1), (5, -1, 1), (5, -(2**40), 2)])
def test_counts_below_zero_are_damage(counts: tuple[int, int, int], tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    file.write_bytes(no_columns(*counts))
    for door in (as_file, as_folder, rows_of):
        with pytest.raises(UserError, match="counts of rows are damaged"):
            door(file)


def test_damaged_parquet_is_one_sentence(tmp_path: Path) -> None:
    column = pyarrow.array([[1, 2], [3]] * 50)
    write(column)(tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    rng, said = random.Random(0), set[str]()
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "train.parquet"
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(4, len(content))] = rng.randrange(256)
        file.write_bytes(content)
        for door in (as_file, rows_of):
            with fuzz.watched():
                try:
                    door(file)
                except UserError as error:
                    fuzz.one_sentence(str(error))
                    said.add(str(error))
    assert any(DAMAGED in sentence for sentence in said)
