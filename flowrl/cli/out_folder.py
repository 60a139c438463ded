"""The folder that `--out` names."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrl.errors import UserError


def out_folder(out: Path) -> Path:
    """Create the folder, which may already exist if it is empty. UserError if it has files, which
    would be overwritten, or cannot be created."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} is a file; give a folder instead")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out: {out} already has files: choose a new folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot create the folder {out}: {error.strerror}") from error
    return out


@contextmanager
def whole_or_empty(folder: Path) -> Iterator[None]:
    """If the body fails, what it has written into the folder is removed."""
    try:
        yield
    except BaseException:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise
