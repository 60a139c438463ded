"""Reading small files that anybody may have written: within limits of bytes and values.

What flowrl wrote into a folder may come back from another machine, cut, or made by hand. A reader
says how large it can be at most; a pipe or a device, which might never end, is no file.
Errors are those of a file that cannot be read: OSError, and ValueError for its content.
"""

import errno
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import IO, Any

MOST_LINE = 2**22  # bytes of a line of a record
MOST_FILE_LINES = 1_000_000  # of a record
_MOST_VALUES = 5_000_000  # of a JSON text; each takes about a hundred bytes of memory
_VALUES = (b",", b"[", b"{")


def bounded_bytes(path: Path, most: int, *, links: bool = True) -> bytes:
    """The content of a plain file of at most `most` bytes. OSError for anything else, and without
    `links` for a link."""
    with _opened(path, most, links) as file:
        return file.read(most)


def check_bounded(path: Path, most: int, *, links: bool = True) -> None:
    """OSError for what `bounded_bytes` would not read; nothing is read."""
    _opened(path, most, links).close()


def bounded_text(path: Path, most: int) -> str:
    """The same as text in UTF-8. ValueError if it is not."""
    return bounded_bytes(path, most).decode("utf-8")


def bounded_lines(path: Path, most: int, *, links: bool = True) -> Iterator[bytes]:
    """The lines of a plain file of at most `most` bytes, without their ends, one at a time. OSError
    for another file, for more than MOST_FILE_LINES lines, and for one of more than MOST_LINE
    bytes."""
    with _opened(path, most, links) as file:
        for number in count(1):
            if not (line := file.readline(MOST_LINE + 1)):
                return
            if number > MOST_FILE_LINES:
                raise OSError(errno.EFBIG, f"more than {MOST_FILE_LINES} lines", str(path))
            if len(line) > MOST_LINE:
                raise OSError(errno.EFBIG, f"a line of more than {MOST_LINE} bytes", str(path))
            yield line.removesuffix(b"\n")


def bounded_json(
    path: Path, most: int, restored: Callable[[dict[str, Any]], Any] | None = None
) -> Any:
    """The value in a JSON file of at most `most` bytes. `restored`: what an object stands for.
    OSError, and ValueError for what is not JSON, is nested too deep or has too many values."""
    return parsed_json(bounded_bytes(path, most), restored)


def check_values(data: bytes) -> None:
    """ValueError for a JSON text of more than _MOST_VALUES values, before a reader makes them."""
    if len(data) > _MOST_VALUES and sum(map(data.count, _VALUES)) > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES} values")


def parsed_json(data: bytes, restored: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The value of a JSON text in UTF-8. ValueError, also for one that is nested too deep or has
    more than _MOST_VALUES values."""
    check_values(data)
    try:
        return json.loads(data.decode("utf-8"), object_hook=restored)
    except RecursionError as error:
        raise ValueError("its lists and mappings are nested too deep") from error


def json_object(data: bytes) -> Mapping[str, Any] | None:
    """The object of a line of JSON, with its keys stored once; None for anything else."""
    try:
        parsed = parsed_json(data)
    except ValueError:
        return None
    return (
        {sys.intern(key): value for key, value in parsed.items()} if type(parsed) is dict else None
    )


def _opened(path: Path, most: int, links: bool) -> IO[bytes]:
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    file = open(os.open(path, flags), "rb")  # noqa: SIM115 the caller closes it
    try:
        _check(os.fstat(file.fileno()), path, most)
    except OSError:
        file.close()
        raise
    return file


def _check(status: os.stat_result, path: Path, most: int) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "a folder, not a file", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    if status.st_size > most:
        words = f"{status.st_size} bytes, more than the {most} that it may have"
        raise OSError(errno.EFBIG, words, str(path))
