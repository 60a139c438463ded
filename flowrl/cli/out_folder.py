"""The folder that `--out` names."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrl.evaluation.outputs import make_output_folder


def out_folder(out: Path) -> Path:
    """Create the folder, which may already exist if it is empty. UserError if it has files, which
    would be overwritten, or cannot be written."""
    make_output_folder(out, empty=True)
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
