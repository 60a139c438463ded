"""Folders that exist completely or not at all, and the lock of a run's folder.

A folder is filled under a temporary name, synced to disk, and renamed. A folder to be removed is
renamed first. So every folder under its final name is complete, even if the process is killed or
the machine loses power.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from flowrl.bounded_files import bounded_json
from flowrl.errors import FolderInUse, UserError, after
from flowrl.json_text import json_text
from flowrl.pages.run_folder import EXPORTED
from flowrl.whole_file import NO_SYNC

CONTENTS = "files.json"  # what a folder should hold: name -> [bytes, CRC-32]
LOCK = ".lock"
WRITTEN = {"checkpoints", "best", "samples", "report", "given", *EXPORTED}
WRITTEN |= {f"{name}_raw" for name in EXPORTED}
WRITTEN_FILES = {"run.yaml", "metrics.jsonl", "report.html", "starts.jsonl", "alarms.jsonl"}
WRITTEN_FILES |= {"row_checks.jsonl"}
# what file systems of networks and of user space answer to a lock that they lack, and to a sync
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
NO_FOLDER_SYNC = {*NO_SYNC, errno.EACCES, errno.EPERM, errno.EISDIR, errno.EBADF}
LITTLE = 2**20  # bytes: with less than this free, a failed write is reported as a full disk
BLOCK = 2**20
MOST_LIST = 2**24  # bytes of a list of files
NUMBER = re.compile(r"[0-9]+")
OWNER = re.compile(r"process (\d{1,9}) on (.+)")


def write_folder(folder: Path, write: Callable[[Path], None], listed: bool = False) -> None:
    """Let `write` fill a folder under a temporary name, then rename it.

    `listed` adds a list of the files and their checksums, for `damage`. UserError if the disk is
    full or writing fails; then no half-written folder remains, and an older folder of that name
    does.
    """
    beside, before = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    free = None
    try:
        try:
            _fill(beside, write, listed)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch's and safetensors' too
            free = after(error, lambda: shutil.disk_usage(folder.parent).free, None)
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
        (folder / CONTENTS).write_text(json_text(sums(folder)))
    for path in folder.rglob("*"):
        to_disk(path)
    to_disk(folder)


def appear(folder: Path, write: Callable[[Path], None]) -> None:
    """Create a folder that becomes visible only once `write` has filled it.

    FileExistsError if it exists, or if another process creates it first.
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


def to_disk(path: Path) -> bool:
    """Sync a file's content, or a folder's names, to disk; False if the file system cannot."""
    lacks = NO_FOLDER_SYNC if path.is_dir() else NO_SYNC
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in lacks:
            return False
        raise
    return True


def sweep(parent: Path) -> None:
    """Remove folders that killed processes left half-written or half-removed."""
    for path in (*parent.glob(".*.tmp"), *parent.glob(".*.old")):
        shutil.rmtree(path, ignore_errors=True)


def put_away(folder: Path) -> None:
    """Remove a folder, which is never visible half-removed under its own name."""
    gone = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def sums(folder: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of every file in a folder, except the list itself."""
    listed = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if (name := path.relative_to(folder).as_posix()) != CONTENTS:
            listed[name] = [path.stat().st_size, _checksum(path)]
    return listed


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def damage(folder: Path) -> str | None:
    """Describe how a folder differs from its list of files; None if it is intact."""
    try:
        wanted = bounded_json(folder / CONTENTS, MOST_LIST)
    except (OSError, ValueError) as error:
        return f"{CONTENTS} is not readable ({reason(error)})"
    if not isinstance(wanted, dict):
        return f"{CONTENTS} is not a list of files"
    if not wanted:
        return f"{CONTENTS} lists no file"
    present = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    for name, entry in wanted.items():  # all sizes first: they take no time
        if not isinstance(entry, list) or len(entry) != 2:
            return f"{CONTENTS} has no size and checksum for {name}"
        if name not in present:
            return f"{name} is missing"
        if not present[name].is_file():
            return f"{name} is not a file"
        if (size := present[name].stat().st_size) != entry[0]:
            return f"{name} has {size} of {entry[0]} bytes"
    try:
        changed = (name for name, entry in wanted.items() if _checksum(present[name]) != entry[1])
        name = next(changed, None)
    except OSError as error:
        return f"its files are not readable ({reason(error)})"
    return None if name is None else f"{name} has another checksum than when it was written"


def numbered_folders(parent: Path) -> list[Path]:
    """Children of a folder with numbers as names, in increasing order."""
    children = [path for path in parent.glob("[0-9]*") if NUMBER.fullmatch(path.name)]
    return sorted(children, key=lambda path: (int(path.name), path.name))


def reason(error: Exception, free: int | None = None) -> str:
    """Describe a failed write in a few words; `free`: bytes that were free on the disk."""
    text = " ".join(str(error).split())
    if (free is not None and free < LITTLE) or "No space left" in text or "quota" in text.lower():
        return "the disk is full"
    return text or type(error).__name__


@contextmanager
def held(folder: Path, warn: Callable[[str], None] = print) -> Iterator[str | None]:
    """Hold the lock of a run's folder. Yields the owner of a stale lock, if any: another process,
    since a run that ended by an exception leaves its own name in a process that lives on.

    The system releases the lock when its process ends, however it ends. On a file system without
    locks the file records the owner's process and host, and `warn` reports it. FolderInUse if
    another process holds it.
    """
    check_plain(folder)
    try:
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise UserError(f"{folder} cannot be written to: {reason(error)}") from error
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        if not _locked(file, folder):
            _refuse_owner(_owner(file), folder)
            warn(
                f"the file system of {folder} has no locks, so {folder / LOCK} names the process "
                "that trains there; do not start two processes at the same moment"
            )
        if not to_disk(folder):
            warn(
                f"the file system of {folder} cannot sync folders: after a power failure the "
                "newest files may be missing"
            )
        before = _owner(file)
        os.ftruncate(file, 0)
        with suppress(OSError):  # on a full disk the lock holds all the same
            os.pwrite(file, owner.encode(), 0)
        yield before if before not in ("", owner) else None
        os.ftruncate(file, 0)
    finally:
        os.close(file)


def in_use(folder: Path) -> bool:
    """Whether a process trains in a run's folder: it holds the lock, or, on a file system without
    locks, the lock file names a process that lives or is another machine's. Changes nothing."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if not _locked(file, folder):
            _refuse_owner(_owner(file), folder)
    except UserError:
        return True
    finally:
        os.close(file)
    return False


def check_plain(folder: Path) -> None:
    """UserError for links, pipes and devices among the files that a run writes, replaces and
    removes, since a link could lead outside the folder. Some trackers' own folders contain
    links."""
    for path in _entries(folder):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "not a plain file"
            raise UserError(
                f"{path} is {kind}, but a run only writes and removes plain files and folders: "
                "replace it with a plain file or folder, or remove it"
            )
    for names, wrong_kind, wanted in (
        (WRITTEN, "file", "folder"),
        (WRITTEN_FILES, "folder", "file"),
    ):
        for path in (folder / name for name in sorted(names)):
            if path.exists() and path.is_dir() == (wanted == "file"):
                raise UserError(
                    f"{path} is a {wrong_kind}, but a run writes a {wanted} there: move it away"
                )


def _entries(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        yield path
        if path.name in WRITTEN and path.is_dir() and not path.is_symlink():
            for parent, folders, files in os.walk(path):
                yield from (Path(parent) / name for name in (*folders, *files))


def _locked(file: int, folder: Path) -> bool:
    """Lock the open file; False if the file system has no locks. FolderInUse if another process
    holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = _owner(file) or "another process"
        raise FolderInUse(
            f"{folder} is being trained by {owner}",
            ": stop that process first, or wait until it ends",
        ) from error
    except OSError as error:
        if error.errno in NO_LOCKS:
            return False
        raise UserError(f"{folder / LOCK} cannot be locked: {reason(error)}") from error
    return True


def _refuse_owner(owner: str, folder: Path) -> None:
    """Error if a lock file names a process that may train: FolderInUse for one that lives on this
    host, for whose end one can wait, UserError for one on another host, whose end nothing shows."""
    match = OWNER.fullmatch(owner)
    same_host = match is not None and match[2] == socket.gethostname()
    if match is None or (same_host and not _lives(int(match[1]))):
        return
    reason = (
        f"{folder / LOCK} says that {owner} trains this run, but the file system has no locks to "
        "verify that"
    )
    if same_host:
        raise FolderInUse(reason, ": if that process is gone, remove the file")
    raise UserError(f"{reason}: if that process is gone, remove the file")


def _lives(process: int) -> bool:
    if process == os.getpid():
        return False  # an earlier run of this process
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _owner(lock: int) -> str:
    """Read the name in a lock file as one printable line, since the file may hold anything."""
    text = os.pread(lock, 200, 0).decode(errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in text).strip()
