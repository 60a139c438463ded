"""Folders that are there whole or not at all, and the one process that may write in a run's.

A folder is filled beside its place, brought to the disk, and renamed. What is put away is renamed
first and removed after. So a process may be killed, or the machine lose power, at any moment:
whatever stands under a proper name is complete.
"""

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from flowrl.errors import UserError

CONTENTS = "files.json"  # what a folder should hold: name -> [bytes, CRC-32]
LOCK = ".lock"
LITTLE = 2**20  # bytes: with less than this free, a failed write is told as a full disk
BLOCK = 2**20


def write_folder(folder: Path, write: Callable[[Path], None], listed: bool = False) -> None:
    """Let `write` fill a folder, then put it in place under its name at once.

    `listed` adds a list of the files and their sums, for `damage`. UserError where the disk is
    full or refuses; nothing half-written stays then, and an older folder of that name does.
    """
    beside, before = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    free = None
    try:
        try:
            _fill(beside, write, listed)
        except (OSError, RuntimeError, SafetensorError):  # torch and safetensors have their own
            free = shutil.disk_usage(folder.parent).free if folder.parent.exists() else None
            raise
        shutil.rmtree(before, ignore_errors=True)
        if folder.exists():
            folder.rename(before)
        beside.rename(folder)
        to_disk(folder.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{folder} could not be written: {reason(error, free)}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(before, ignore_errors=True)


def _fill(folder: Path, write: Callable[[Path], None], listed: bool) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write(folder)
    if listed:
        (folder / CONTENTS).write_text(json.dumps(sums(folder)))
    for path in folder.rglob("*"):
        to_disk(path)
    to_disk(folder)


def appear(folder: Path, write: Callable[[Path], None]) -> None:
    """Make a new folder that nobody ever sees without what `write` puts in it.

    FileExistsError if it is there already, or another process was quicker.
    """
    if folder.exists():
        raise FileExistsError(errno.EEXIST, "exists", str(folder))
    beside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        _fill(beside, write, listed=False)
        beside.rename(folder)  # onto a folder with files in it this fails
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise FileExistsError(errno.EEXIST, "exists", str(folder)) from error
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def to_disk(path: Path) -> None:
    """Of a file, what is in it; of a folder, the names in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(parent: Path) -> None:
    """Remove what killed processes left half-written or half-removed in a folder."""
    for path in (*parent.glob(".*.tmp"), *parent.glob(".*.old")):
        shutil.rmtree(path, ignore_errors=True)


def put_away(folder: Path) -> None:
    """Remove a folder, of which no part is ever seen under its own name."""
    gone = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sums(folder: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of every file of a folder, but of the list itself."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name, crc = path.relative_to(folder).as_posix(), 0
        if name == CONTENTS:
            continue
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                crc = zlib.crc32(block, crc)
        found[name] = [path.stat().st_size, crc]
    return found


def damage(folder: Path) -> str | None:
    """What is wrong with a folder that was written with its list; None for a sound one."""
    try:
        wanted, found = json.loads((folder / CONTENTS).read_text()), sums(folder)
    except (OSError, ValueError) as error:
        return f"{CONTENTS} is not readable ({error})"
    for name, (size, crc) in wanted.items():
        if name not in found:
            return f"{name} is missing"
        if found[name][0] != size:
            return f"{name} has {found[name][0]} of {size} bytes"
        if found[name][1] != crc:
            return f"{name} is not what was written"
    return None


def reason(error: Exception, free: int | None = None) -> str:
    """A failed write in a few words; `free` are the bytes that were left on the disk."""
    text = " ".join(str(error).split())
    if (free is not None and free < LITTLE) or "No space left" in text or "quota" in text.lower():
        return "the disk is full"
    return text or type(error).__name__


@contextmanager
def held(folder: Path) -> Iterator[str | None]:
    """Be the only one who trains in a folder. Gives who died while holding it, if somebody did.

    The system lets go of the lock when its process ends, however it ends. UserError where another
    process holds it.
    """
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{folder} cannot be written to: {reason(error)}") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = os.pread(file, 200, 0).decode() or "another process"
            raise UserError(
                f"{folder} is being trained by {who}: stop that first, or wait for its end"
            ) from error
        before = os.pread(file, 200, 0).decode()
        os.ftruncate(file, 0)
        with suppress(OSError):  # on a full disk the lock holds all the same
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield before or None
        os.ftruncate(file, 0)
    finally:
        os.close(file)
