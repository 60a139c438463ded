"""The folder that `--out` names."""

from pathlib import Path

from flowrl.errors import UserError


def out_folder(out: Path) -> Path:
    """Make the folder, which may be there if it is empty. UserError for one that holds files, which
    would be replaced, and for one that cannot be made."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out: {out} is a file, and a folder is needed: name another one")
    if out.is_dir() and any(out.iterdir()):
        raise UserError(f"--out: {out} already holds files: name a new folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot make the folder {out}: {error.strerror}") from error
    return out
