"""Reasons beside damage for which the files of a model cannot be read: a folder that is gone,
rights, a disk that does not answer. Another download helps against damage alone.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DOWNLOAD_AGAIN = "download it again"
RIGHTS = (errno.EACCES, errno.EPERM)
_DISK = (  # of a failing disk, and of a network's disk that is away
    errno.EIO, errno.ENODEV, errno.ENOTCONN, errno.ENXIO, errno.ESTALE, errno.ETIMEDOUT,
    errno.EHOSTDOWN, errno.EHOSTUNREACH,
)  # fmt: skip
NO_DAMAGE = (*RIGHTS, *_DISK)
_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_GONE = "it was moved, renamed, removed or unmounted; give its present place"


def way_to_read(file: Path, error: BaseException) -> str:
    """A clause on what helps after an error of reading a file: another download for damage, and for
    a file that its folder lacks. Whether the model's whole folder is gone, `reachable` finds."""
    number = error.errno if isinstance(error, OSError) else None
    if number in RIGHTS:
        return "change its rights, or those of its folder"
    if number in _DISK:
        return "its disk does not answer; mount it again, or copy the folder to another disk"
    if is_absent(fault_of(file.parent)):
        return f"there is no folder {file.parent}: give its present place, or {DOWNLOAD_AGAIN}"
    return DOWNLOAD_AGAIN


@contextmanager
def reachable(place: str, path: Path, kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Read `path`, a file or a folder, in the body. What its readers raise is a `kind` of one
    sentence, which begins with `place`, if the path is gone meanwhile, its rights do not let it be
    read, or its disk does not answer. Other errors pass, and so do those of a path that was not
    there from the beginning."""
    existed = not is_absent(fault_of(path))
    try:
        yield
    except Exception as error:
        if (cause := _cause(path, error, existed)) is None:
            raise
        raise kind(f"{place}: {cause}") from error


def _cause(path: Path, error: BaseException, existed: bool) -> str | None:
    now = fault_of(path)
    raised = [e for e in (*chain_of(error), now) if isinstance(e, OSError) and _within(e, path)]
    if is_absent(now):
        # a reader that misses a file in it has seen the folder before
        gone = existed or any(is_absent(fault) for fault in raised if fault is not now)
        return f"{path} is no longer there: {_GONE}" if gone else None
    for fault in raised:
        if fault.errno in NO_DAMAGE:
            file = Path(os.fsdecode(fault.filename))
            reason = (fault.strerror or str(fault)).lower()
            return f"{file} cannot be read ({reason}): {way_to_read(file, fault)}"
    return None


def _within(fault: OSError, path: Path) -> bool:
    """Whether an error is of this path, or of a file below it. One without a name may be of a
    network."""
    if not isinstance(fault.filename, str | bytes | os.PathLike):
        return False
    return Path(os.fsdecode(fault.filename)).is_relative_to(path)


def is_absent(fault: OSError | None) -> bool:
    return fault is not None and fault.errno in _ABSENT


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it, the first one first. Each one once: an error that a
    library keeps and raises again may lead to itself."""
    chain = list[BaseException]()
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    yield from reversed(chain)


def fault_of(path: Path) -> OSError | None:
    """Why a file or a folder cannot be opened now; None if it can be."""
    try:
        if os.path.isdir(path):
            os.listdir(path)
        else:
            os.stat(path)
    except OSError as error:
        return error
    return None
