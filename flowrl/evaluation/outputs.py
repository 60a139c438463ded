"""Check output paths before the long work that fills them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from flowrl.errors import UserError, write_fault


def check_output_file(path: Path, option: str = "--out", begins: bytes = b"") -> None:
    """UserError if no file can be written at the path, or if a file there begins with something
    else than what is written: it is not an earlier output, such as a run's settings."""
    if os.path.isdir(path):  # which takes names that are too long
        raise UserError(f"{option}: {path} is a folder; give a file in it")
    if _is_absent(path.parent):
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
            f"{option}: {str(path)!r} cannot be written: {write_fault(error)}"
        ) from error
    if head and head != begins:
        raise UserError(
            f"{option}: {path} exists, and is nothing that this command writes; choose another name"
        )


def make_output_folder(path: Path, option: str = "--out", *, empty: bool = False) -> None:
    """Create a folder with its parents, unless it is there, and write into it for trial: rights
    alone do not say whether that fails. UserError if it does, and with `empty` for a folder that
    has files, which would be overwritten."""
    if os.path.isfile(path):
        raise UserError(f"{option}: {path} is a file; give a folder instead")
    try:
        filled = empty and os.path.isdir(path) and any(path.iterdir())
        path.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path, prefix=".trial-"):
            pass
    except FileExistsError as error:
        raise UserError(
            f"{option}: {path} is a link to nothing, or no folder: choose another place"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{option}: cannot write into the folder {str(path)!r}: {write_fault(error)}"
        ) from error
    if filled:
        raise UserError(f"{option}: {path} already has files: choose a new folder")


def _is_absent(folder: Path) -> bool:
    """Whether nothing has this name; False where that cannot be seen."""
    try:
        folder.stat()
    except (OSError, ValueError) as error:
        return isinstance(error, FileNotFoundError)
    return False


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
