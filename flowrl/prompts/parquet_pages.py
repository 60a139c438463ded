"""Sum what the pages of a parquet file say of themselves, without unpacking one.

The counts in a file's header are only a promise: a reader unpacks whole pages, whatever the header
says. Each page begins with a struct in Thrift's compact form (parquet-format, `PageHeader`):
2 and 3 its bytes unpacked and packed, 5 or 8 a struct whose field 1 is its number of values.
"""

from collections.abc import Iterator
from typing import IO, Any, NamedTuple

DAMAGED = "the headers of its pages are damaged"
_MOST_HEADER = 2**12  # bytes that are read first; statistics may make a header longer
_LONGEST_HEADER = 2**27
_STRUCT, _LISTS = 12, (9, 10)
_TRUTHS, _WHOLES, _BYTE, _DOUBLE, _TEXT = (1, 2), (4, 5, 6), 3, 7, 8
_MOST_DEPTH = 16
_UNPACKED, _PACKED, _COUNTED = 2, 3, (5, 8)


class Pages(NamedTuple):
    """Sums over the pages of a column chunk: values, and bytes once they are decompressed."""

    values: int
    size: int


def pages_of(file: IO[bytes], chunk: Any) -> Pages:
    """Sum the pages of a column chunk (pyarrow's `ColumnChunkMetaData`). ValueError if their
    headers cannot be followed."""
    begin = int(chunk.data_page_offset)
    if chunk.has_dictionary_page and 0 < (before := int(chunk.dictionary_page_offset)) < begin:
        begin = before
    end, values, size = begin + int(chunk.total_compressed_size), 0, 0
    while begin < end:
        try:
            fields, length = _header_at(file, begin)
        except (IndexError, ValueError) as error:
            raise ValueError(DAMAGED) from error
        packed, unpacked = fields.get(_PACKED, -1), fields.get(_UNPACKED, -1)
        counts = [fields[name] for name in _COUNTED if name in fields]
        if min(packed, unpacked, *counts, 0) < 0:
            raise ValueError(DAMAGED)
        values, size = values + sum(counts), size + unpacked
        begin += length + packed
    return Pages(values, size)


def _header_at(file: IO[bytes], begin: int) -> tuple[dict[int, int], int]:
    """The fields of the page header at an offset, and its length. A header with long statistics is
    read again with more bytes."""
    most = _MOST_HEADER
    while True:
        file.seek(begin)
        reader = _Compact(file.read(most))
        try:
            return reader.page(), reader.at
        except IndexError:
            if most >= _LONGEST_HEADER or len(reader.data) < most:
                raise
            most *= 32


class _Compact:
    """Reads Thrift's compact form. IndexError at the end of the bytes, ValueError for what is not
    of this form."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def page(self) -> dict[int, int]:
        """The whole numbers of a page header; of its inner structs, their first field."""
        fields = dict[int, int]()
        for name, kind in self._fields():
            if kind in _WHOLES:
                fields[name] = self._whole()
            elif kind == _STRUCT and name in _COUNTED:
                for inner, inner_kind in self._fields():
                    if inner == 1 and inner_kind in _WHOLES:
                        fields[name] = self._whole()
                    else:
                        self._skip(inner_kind, 2)
            else:
                self._skip(kind, 1)
        return fields

    def _fields(self) -> Iterator[tuple[int, int]]:
        name = 0
        while (byte := self._byte()) != 0:
            step, kind = byte >> 4, byte & 15
            name = name + step if step else self._whole()
            yield name, kind

    def _skip(self, kind: int, depth: int) -> None:
        if depth > _MOST_DEPTH:
            raise ValueError("structs are nested too deep")
        if kind in _WHOLES:
            self._plain()
        elif kind in (_BYTE, _DOUBLE):
            self._over(1 if kind == _BYTE else 8)
        elif kind == _TEXT:
            self._over(self._plain())
        elif kind in _LISTS:
            byte = self._byte()
            for _ in range(self._plain() if byte >> 4 == 15 else byte >> 4):
                self._skip_entry(byte & 15, depth)
        elif kind == _STRUCT:
            for _, inner in self._fields():
                self._skip(inner, depth + 1)
        elif kind not in _TRUTHS:  # a map stands in no page header
            raise ValueError(f"no type {kind} in a page header")

    def _skip_entry(self, kind: int, depth: int) -> None:
        """Skip an entry of a list, in which a truth value has a byte of its own."""
        if kind in _TRUTHS:
            self._over(1)
        else:
            self._skip(kind, depth + 1)

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _over(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise IndexError(self.at)

    def _plain(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _whole(self) -> int:
        number = self._plain()
        return (number >> 1) ^ -(number & 1)
