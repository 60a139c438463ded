"""The header of a GGUF file, as far as it says how long the file is.

The form is ggml's docs/gguf.md: a magic, a version, counts, settings, and for each tensor its name,
shape, type and place.
"""

import math
import struct
from typing import IO

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_COUNT = 2**20  # tensors, settings or dimensions
_MOST_ENTRIES = 2**26  # of a list among the settings
_MOST_NAME = 2**16  # bytes
_TEXT, _LIST = 8, 9
_NUMBERS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes, by type
# ggml's types: numbers of a block, and its bytes
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 40), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip


class _Damaged(Exception):
    """A header that cannot be read."""


def gguf_damage(opened: IO[bytes], size: int) -> str:
    """A clause on what is wrong with a GGUF file; empty if its header is whole and its size is the
    one that the header says. The values of settings and tensors are not read."""
    opened.seek(0)
    if opened.read(4) != _MAGIC:
        return "is not a GGUF file"
    try:
        whole = _Header(opened, size).whole()
    except _Damaged as damage:
        return f"is cut off, or its header is damaged ({damage})"
    return f"has {size} bytes instead of at least {whole}" if size < whole else ""


class _Header:
    def __init__(self, opened: IO[bytes], size: int) -> None:
        self.opened, self.size = opened, size

    def whole(self) -> int:
        """The least number of bytes of the whole file."""
        version = self.number("<I")
        if version not in _VERSIONS:
            raise _Damaged(f"version {version}")
        tensors, settings = self.count(), self.count()
        alignment = 32
        for _ in range(settings):
            name, kind = self.text(), self.number("<I")
            if name == b"general.alignment" and kind == 4:
                alignment = self.number("<I") or 1
            else:
                self.skip_value(kind, 0)
        ends = [self.tensor_end() for _ in range(tensors)]
        begin = -(-self.opened.tell() // alignment) * alignment
        return begin + max(ends, default=0)

    def tensor_end(self) -> int:
        self.text()
        dimensions = self.number("<I")
        if dimensions > 8:
            raise _Damaged(f"a tensor of {dimensions} dimensions")
        shape = [self.number("<Q") for _ in range(dimensions)]
        kind, place = self.number("<I"), self.number("<Q")
        block = _BLOCKS.get(kind)
        if block is None:
            return place
        return place + -(-math.prod(shape) // block[0]) * block[1]

    def count(self) -> int:
        count = self.number("<Q")
        if count > _MOST_COUNT:
            raise _Damaged(f"a count of {count}")
        return count

    def number(self, form: str) -> int:
        return struct.unpack(form, self.read(struct.calcsize(form)))[0]

    def text(self) -> bytes:
        length = self.number("<Q")
        if length > _MOST_NAME:
            raise _Damaged(f"a name of {length} bytes")
        return self.read(length)

    def read(self, length: int) -> bytes:
        content = self.opened.read(length)
        if len(content) < length:
            raise _Damaged("it ends inside of the header")
        return content

    def skip(self, length: int) -> None:
        place = self.opened.tell() + length
        if place > self.size:
            raise _Damaged("it ends inside of the header")
        self.opened.seek(place)

    def skip_value(self, kind: int, depth: int) -> None:
        if kind in _NUMBERS:
            self.skip(_NUMBERS[kind])
        elif kind == _TEXT:
            self.skip(self.number("<Q"))
        elif kind == _LIST and depth < 4:
            inner, entries = self.number("<I"), self.number("<Q")
            if entries > _MOST_ENTRIES:
                raise _Damaged(f"a list of {entries}")
            if inner in _NUMBERS:
                self.skip(entries * _NUMBERS[inner])
                return
            for _ in range(entries):
                self.skip_value(inner, depth + 1)
        else:
            raise _Damaged(f"a setting of type {kind}")
