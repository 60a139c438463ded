"""Files of a run's folder that a page reads. Anybody may have written the folder."""

import errno
from collections.abc import Iterator
from pathlib import Path

from flowrl.bounded_files import bounded_bytes, bounded_lines, check_bounded

MOST_READ_BYTES = 2**28  # of a file; a hundred thousand lines of metrics.jsonl have fewer


def plain_bytes(run: Path, path: Path, most: int = MOST_READ_BYTES) -> bytes:
    """The content of a plain file in a run's folder, of at most so many bytes.

    OSError if there is none. A pipe or a device, which might never end, a link that leads out of
    the folder, and a larger file count as none.
    """
    real = _inside(run, path)
    return bounded_bytes(real, most, links=False)


def check_readable(run: Path, path: Path, most: int = MOST_READ_BYTES) -> None:
    """OSError likewise; nothing is read."""
    check_bounded(_inside(run, path), most, links=False)


def plain_lines(run: Path, path: Path, most: int = MOST_READ_BYTES) -> Iterator[bytes]:
    """The lines of such a file, one at a time; OSError likewise."""
    real = _inside(run, path)
    yield from bounded_lines(real, most, links=False)


def _inside(run: Path, path: Path) -> Path:
    real = path.resolve(strict=True)
    if not real.is_relative_to(run.resolve()):
        raise OSError(errno.ELOOP, "a link out of the run's folder", str(path))
    return real
