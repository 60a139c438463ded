"""Check output paths before the long work that fills them."""

import os
from pathlib import Path

from flowrl.errors import UserError


def check_output_file(path: Path, option: str = "--out") -> None:
    """UserError if no file can be written at the path."""
    if path.is_dir():
        raise UserError(f"{option}: {path} is a folder; give a file in it")
    if not path.parent.is_dir():
        raise UserError(f"{option}: there is no folder {path.parent}; create it, or choose another")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{option}: {path} cannot be written; choose another place")


def make_output_folder(path: Path, option: str = "--out") -> None:
    """Create a folder with its parents. UserError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: cannot create the folder {path}: {error.strerror}") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"{option}: cannot write into {path}; choose another folder")
