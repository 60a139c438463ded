"""Read parquet files of strangers within limits. A few bytes of a file may stand for any number of
equal cells, so the header's counts are checked first, and texts stay packed, at any depth, until
their sizes are known."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from flowrl.prompts.parquet_pages import pages_of
from flowrl.prompts.table_limits import (
    CELL,
    MOST_CELLS,
    MOST_TABLE_BYTES,
    MOST_TABLE_ROWS,
    check_rows_fit,
)

_AT_ONCE = 1024  # rows
_TOO_LARGE = f"more than {MOST_TABLE_BYTES // 2**20} MiB once unpacked"


def parquet_columns(path: Path) -> list[str]:
    """The names of the columns of a parquet file, from its header. ValueError for another file."""
    from pyarrow import parquet

    with _valid(), parquet.ParquetFile(path) as file:
        return list(file.schema_arrow.names)


def parquet_rows(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a parquet file, with these columns; None: all.

    ValueError, before memory is taken for them, if they have more than MOST_TABLE_ROWS rows,
    MOST_CELLS cells (entries of lists count) or MOST_TABLE_BYTES bytes once unpacked, or take more
    than half of this machine's free memory, and for a file that is not parquet."""
    with _valid():
        return [row for batch in _batches(path, columns) for row in batch.to_pylist()]


def check_parquet(path: Path) -> None:
    """Raise what `parquet_rows` raises for the file, without keeping its rows."""
    with _valid():
        for _ in _batches(path, None):
            pass


def unpacked_sizes(path: Path, most: int) -> Iterator[int]:
    """Bytes of a parquet file's parts once unpacked: of a column that its header counts above
    `most`, or else of batches of rows, whose equal texts the header counts once. ValueError for a
    file that is not parquet."""
    from pyarrow import parquet

    with _valid(), parquet.ParquetFile(path) as file:
        header = file.metadata
        groups = [header.row_group(group) for group in range(header.num_row_groups)]
        stored = sum(group.total_byte_size for group in groups)
        leaves = [header.schema.column(index) for index in range(header.num_columns)]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    if stored > most:
        yield stored
        return
    with _valid(), parquet.ParquetFile(path, read_dictionary=texts) as packed:
        for batch in packed.iter_batches(_AT_ONCE):
            yield sum(map(_unpacked, batch.columns))


@contextmanager
def _valid() -> Iterator[None]:
    """Turn the errors of pyarrow into ValueError."""
    from pyarrow import ArrowException

    try:
        yield
    except OverflowError as error:  # a date after the year 9999, which Python has not
        message = " ".join(str(error).split())[:200]
        raise ValueError(
            f"a column has dates or durations that Python cannot hold ({message}): leave it out, "
            "or write them as texts"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"a column of texts is not UTF-8 ({error}): write it again, or as a column of bytes"
        ) from error
    except (ArrowException, OSError, MemoryError) as error:
        message = " ".join(str(error).split())[:200]
        raise ValueError(f"not valid parquet ({message})") from error


def _batches(path: Path, columns: Sequence[str] | None) -> Iterator[Any]:
    """The rows, some at once, with texts as dictionaries."""
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        texts = _checked_pages(file, path, columns)
    names, total = None if columns is None else list(columns), 0
    with parquet.ParquetFile(path, read_dictionary=texts) as packed:
        for batch in packed.iter_batches(_AT_ONCE, columns=names):
            total += sum(map(_unpacked, batch.columns))
            if total > MOST_TABLE_BYTES:
                raise ValueError(_TOO_LARGE)
            yield batch


def _checked_pages(file: Any, path: Path, columns: Sequence[str] | None) -> list[str]:
    """Check the counts of a file's header and of its pages, and return the paths of its texts."""
    header, names = file.metadata, file.schema_arrow.names
    row_groups = [header.row_group(index) for index in range(header.num_row_groups)]
    counts = [int(group.num_rows) for group in row_groups]
    if min(header.num_rows, *counts, 0) < 0:
        raise ValueError("its counts of rows are damaged")
    rows = max(header.num_rows, sum(counts))  # the reader goes by the groups, whatever is above
    if rows > MOST_TABLE_ROWS:
        raise ValueError(f"more than {MOST_TABLE_ROWS} rows")
    if len(set(names)) < len(names):
        raise ValueError("two columns have the same name")
    texts, cells, size = list[str](), 0, 0
    with path.open("rb") as content:
        for index in range(header.num_columns):
            leaf = header.schema.column(index)
            if columns is not None and not any(_within(leaf.path, name) for name in columns):
                continue
            # an empty table has a group without pages
            groups = [group for group in row_groups if group.num_rows]
            pages = [pages_of(content, group.column(index)) for group in groups]
            values = sum(page.values for page in pages)
            cells += max(values, rows)
            size += max(values * leaf.length, sum(page.size for page in pages))
            if leaf.physical_type == "BYTE_ARRAY":
                texts.append(leaf.path)
    if cells > MOST_CELLS:
        raise ValueError(f"more than {MOST_CELLS} cells")
    if size > MOST_TABLE_BYTES:
        raise ValueError(_TOO_LARGE)
    check_rows_fit(size + cells * CELL)
    return texts


def _within(path: str, name: str) -> bool:
    """Whether a leaf's path belongs to a column."""
    return path == name or path.startswith(name + ".")


def _unpacked(array: Any) -> int:
    """The bytes of an array's content once its texts are unpacked."""
    import pyarrow

    compute: Any = import_module("pyarrow.compute")  # it makes its functions when it is imported
    types, kind = pyarrow.types, array.type
    if types.is_dictionary(kind):
        if types.is_primitive(kind.value_type):
            return len(array) * int(kind.value_type.bit_width) // 8
        lengths = compute.binary_length(array.dictionary)
        return int(compute.sum(compute.take(lengths, array.indices)).as_py() or 0)
    if types.is_struct(kind):
        return sum(_unpacked(array.field(index)) for index in range(kind.num_fields))
    if types.is_map(kind):
        return _unpacked(array.keys) + _unpacked(array.items)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _unpacked(array.flatten())
    return int(array.nbytes)
