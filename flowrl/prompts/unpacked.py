"""A bound on what a data set of the hub takes once unpacked, before `datasets` unpacks it: a few
bytes of parquet, gzip, zip or tar may stand for terabytes."""

import bz2
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from flowrl.prompts.parquet import unpacked_sizes

ALWAYS = 2**30  # bytes that no data set is refused for
TIMES = 32  # of the packed bytes: texts shrink to about a tenth
_AT_ONCE = 2**20
_DAMAGE = (EOFError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, zlib.error)


class TooLarge(ValueError):
    """Files that unpack to more than the bound."""


def check_unpacked(files: Iterable[Path], gib: float | None) -> None:
    """TooLarge if files unpack to more than `gib` GiB; None: than 1 GiB and 32 times their own
    bytes. Headers are asked first; where a form's header may lie, its contents are counted, and
    counting ends at the bound."""
    paths = [path for path in files if path.is_file()]
    packed = sum(path.stat().st_size for path in paths)
    most = max(ALWAYS, TIMES * packed) if gib is None else int(gib * 2**30)
    total = 0
    for path in paths:
        try:
            for size in _sizes(path, most - total):
                total += size
                if total > most:
                    raise TooLarge(
                        f"its {packed / 2**20:.1f} MiB unpack to more than {most / 2**30:.3g} "
                        "GiB: if that is right, set unpacked to the GiB that it may take"
                    )
        except _DAMAGE as error:
            raise ValueError(f"{path.name} is damaged ({error}): download it again") from error


def _sizes(path: Path, most: int) -> Iterator[int]:
    """Bytes of the parts of a file once unpacked."""
    with path.open("rb") as file:
        begin = file.read(512)
    if begin.startswith(b"PAR1"):
        yield from unpacked_sizes(path, most)
        return
    if form := next((form for mark, form in _NOT_COUNTED.items() if begin.startswith(mark)), None):
        raise TooLarge(
            f"its file {path.name} is compressed by {form}, whose size cannot be known before it "
            "is unpacked: download the data set, unpack it, and give the folder"
        )
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from (member.file_size for member in archive.infolist())
        return
    opened = next((open_ for mark, open_ in _STREAMS if begin.startswith(mark)), None)
    if opened is None and begin[257:262] != b"ustar":
        yield path.stat().st_size
    elif opened is None:
        yield from _members(path, "r:")
    else:
        with opened(path) as stream:
            head = stream.read(512)
            yield len(head)
            while part := stream.read(_AT_ONCE):
                yield len(part)
        if head[257:262] == b"ustar":  # whose sparse members may be larger than the archive
            yield from _members(path, "r:*")


def _members(path: Path, mode: Any) -> Iterator[int]:
    with tarfile.open(path, mode) as archive:
        for member in archive:
            yield member.size


_STREAMS: tuple[tuple[bytes, Callable[[Path], Any]], ...] = (
    (b"\x1f\x8b\x08", gzip.GzipFile),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\0", lzma.LZMAFile),
)
_NOT_COUNTED = {  # forms that have no reader here that ends at a bound
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"Rar!": "rar",
    b"7z\xbc\xaf\x27\x1c": "7z",
}
