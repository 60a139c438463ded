"""Writing a file completely or not at all, in a folder that anybody may have prepared."""

import errno
import os
import secrets
import shutil
from pathlib import Path
from typing import IO, Any

# what file systems of networks and of user space answer to a sync that they lack
NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def write_whole(path: Path, text: str, *, synced: bool = False) -> None:
    """Write a file through a new one next to it, so that readers never see half a file.

    A link in the place of the file is replaced, not followed, and the new file's name cannot be
    guessed, so nothing outside the folder is written. `synced`: the text is on the disk before it
    takes the place of the older one. OSError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    created = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(os.open(beside, created, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
            if synced:
                flushed(file)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder to a new place. OSError of the first file that fails: copytree's has those of
    all files in one text, and neither a number nor a name."""
    target.mkdir()
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir()
        else:
            shutil.copy2(path, place)


def flushed(file: IO[Any]) -> None:
    """Flush the data of an open file to disk, if the file system can."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
