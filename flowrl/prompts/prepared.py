"""Hub data sets that the library `datasets` has prepared as Arrow files in a cache of its own.

It reads them again without a look at their contents, also after another download, so a damaged one
stays until its folder is removed. Here such a fault is a clause that names the file and that way.
"""

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrl.bounded_files import bounded_text

_INFO = "dataset_info.json"
_MOST_INFO = 2**24  # bytes


def prepared_folder(name: str) -> Path:
    """The folder in which `datasets` prepares a hub data set, whether it exists or not."""
    from datasets import config

    return Path(config.HF_DATASETS_CACHE) / name.replace("/", "___")


def prepared_fault(name: str, error: BaseException) -> str | None:
    """A clause on an error of reading a hub data set whose cause is its prepared files or their
    cache; None if that is sound."""
    folder = prepared_folder(name)
    at = _file_of(error)
    if isinstance(error, OSError) and at is not None and at.is_relative_to(folder.parent):
        absent = isinstance(error, FileNotFoundError) and folder.is_dir()
        if not absent:
            return _of_its_place(at, error)
    try:
        damage = next(_damages(folder), None)
    except OSError as second:
        return _of_its_place(_file_of(second) or folder, second)
    if damage is None:
        return None
    return (
        f"{damage}, though `datasets` has prepared it and would read it again: remove the folder "
        f"{folder}, and the next start makes it again from the hub"
    )


def _of_its_place(at: Path, error: OSError) -> str:
    said = (error.strerror or str(error)).lower()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        way = "make room"
    elif error.errno in (errno.EACCES, errno.EPERM):
        way = "change its rights"
    else:
        way = "look at its disk"
    return (
        f"{at}, in the cache of `datasets`: {said}: {way}, or set HF_DATASETS_CACHE to another "
        "folder"
    )


def _file_of(error: BaseException) -> Path | None:
    name = error.filename if isinstance(error, OSError) else None
    return Path(name) if isinstance(name, str) else None


def _damages(folder: Path) -> Iterator[str]:
    """Clauses on the files of each prepared configuration and version that are gone or damaged."""
    for inside in sorted(folder.glob("*/*/*")) if folder.is_dir() else ():
        if not inside.is_dir() or inside.name.endswith(".incomplete"):
            continue
        info = inside / _INFO
        if not info.is_file():
            yield f"{info} is gone"
            continue
        try:
            tree = json.loads(bounded_text(info, _MOST_INFO))
        except ValueError:
            tree = None
        if not isinstance(tree, dict):
            yield f"{info} is damaged"
            continue
        yield from _damages_of_splits(inside, tree)


def _damages_of_splits(inside: Path, tree: dict[str, Any]) -> Iterator[str]:
    splits = tree.get("splits")
    for split in splits if isinstance(splits, dict) else ():
        files = sorted(inside.glob(f"*-{split}*.arrow"))
        if not files:
            yield f"{inside} has no Arrow file of the split {split}"
        for file in files:
            if (reason := _arrow_damage(file)) is not None:
                yield f"{file} is damaged ({reason})"


def _arrow_damage(file: Path) -> str | None:
    """Why a stream of batches cannot be read to its end; their values are mapped, not read."""
    import pyarrow

    with file.open("rb"):  # its rights and its disk, in Python's words
        pass
    try:
        with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as reader:
            for _ in reader:
                pass
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        return " ".join(str(error).split())[:100]
    return None
