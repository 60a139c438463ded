"""Check output paths before the long work that fills them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flowrl.errors import UserError


def check_output_file(path: Path, option: str = "--out", begins: bytes = b"") -> None:
    """UserError if no file can be written at the path, or if a file there begins with something
    else than what is written: it is not an earlier output, such as a run's settings."""
    if os.path.isdir(path):  # which takes names that are too long
        raise UserError(f"{option}: {path} is a folder; give a file in it")
    if not os.path.isdir(path.parent):
        raise UserError(f"{option}: there is no folder {path.parent}; create it, or choose another")
    head = b""
    try:
        new = not path.exists()
        if new or path.is_file():  # a pipe or a device is opened when it is written
            with path.open("ab"):  # rights alone do not say whether that fails
                pass
            head = b"" if new else _head(path, len(begins))
        if new:
            path.unlink()
    except (OSError, ValueError) as error:  # ValueError: a name with NUL
        raise UserError(
            f"{option}: {str(path)!r} cannot be written ({_why(error)}); choose another place"
        ) from error
    if head and head != begins:
        raise UserError(
            f"{option}: {path} exists, and is nothing that this command writes; choose another name"
        )


def make_output_folder(path: Path, option: str = "--out") -> None:
    """Create a folder with its parents. UserError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{option}: cannot create the folder {str(path)!r}: {_why(error)}"
        ) from error
    if not os.access(path, os.W_OK):
        raise UserError(f"{option}: cannot write into {path}; choose another folder")


def _why(error: OSError | ValueError) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or str(error)


def _head(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


@contextmanager
def removed_if_empty(folder: Path) -> Iterator[Path]:
    """The folder; if the body fails before it has written a file there, it is removed."""
    try:
        yield folder
    except BaseException:
        with suppress(OSError):  # it has files
            folder.rmdir()
        raise
