"""Paths in a run's file: relative to that file's folder first, then to the working folder."""

import filecmp
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.paths import CONFIGS_FOLDER, PACKAGE, own_file
from flowrl.settings.words.short_forms import REWARDS
from rewards.load import own_name

REWARD_SETTINGS = (*REWARDS, "way_rewards")  # its older name too
PlaceOf = Callable[[str], str]  # of a relative path as it is written
_PATHS = {
    ("prompts",),
    ("prompts", "source"),
    ("prompts", "train"),
    ("prompts", "train", "source"),
    ("prompts", "held_out"),
    ("prompts", "held_out", "source"),
    ("model",),
    ("model", "pipeline"),
    ("model", "language"),
    ("model", "weights"),
    ("model", "adapters"),
    ("model", "adapters", "path"),
    ("model", "lora", "from"),
    ("model", "quantization", "file"),
    ("model", "rewriter", "language"),
    ("model", "rewriter", "lora", "from"),
    ("given", "file"),
    ("given", "folder"),
    ("ask", "earlier"),
    ("ask", "replay"),
}


def at_file(tree: Any, file: Path) -> Any:
    """Settings of a file, with paths that exist in its own folder made absolute.

    A path that exists only in the working folder is reported. UserError for a path that exists in
    both, with different contents. In the file's own folder all paths stay as written.
    """
    near = file.absolute().parent
    if near.resolve() == Path.cwd().resolve():
        return tree
    return _walk(tree, (), lambda written: _beside(written, near, file))


def in_full(tree: Any) -> Any:
    """Settings of a run with all paths that exist from the working folder made absolute, so that
    they mean the same in every folder."""
    return _walk(tree, (), lambda w: str(Path(w).absolute()) if _exists(Path(w)) else w)


def _beside(written: str, near: Path, file: Path) -> str:
    beside, in_working_folder = near / written, Path.cwd() / written
    if not _exists(beside):
        if _exists(in_working_folder) and not near.is_relative_to(CONFIGS_FOLDER):
            print(f"{file}: {written} is not in {near}: using {in_working_folder}", file=sys.stderr)
        return written
    if _exists(in_working_folder) and not _same(beside, in_working_folder):
        raise UserError(
            f"{file}: {written} is both {beside} and, from the working folder, "
            f"{in_working_folder}, and the "
            "two differ: write the absolute path of the one to use"
        )
    return str(beside)


def _same(first: Path, second: Path) -> bool:
    """Whether two files are equal, or two folders have files of the same names and sizes."""
    if first.samefile(second):
        return True
    if first.is_file() and second.is_file():
        return filecmp.cmp(first, second, shallow=False)
    return first.is_dir() and second.is_dir() and _listed(first) == _listed(second)


def _listed(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _walk(value: Any, at: tuple[str, ...], place: PlaceOf) -> Any:
    if isinstance(value, Mapping):
        # names of rewards are keys too: `rewards: {taste.py:sharp: 0.5}`
        return {_code(k, place): _walk(v, (*at, str(k)), place) for k, v in value.items()}
    if isinstance(value, list | tuple):
        several = at[:1] == ("prompts",) and at[1:] in ((), ("train",), ("held_out",))
        paths = [_walk(entry, at, place) for entry in value]
        pairs = zip(value, paths, strict=True)
        return [_named(*pair) for pair in pairs] if several and len(paths) > 1 else paths
    if not isinstance(value, str):
        return value
    moved = _code(value, place)
    return _moved(value, place) if moved == value and _is_path(value, at) else moved


def _named(written: Any, path: Any) -> Any:
    """One of several data sets: its name stays, since scores and metrics use it."""
    if isinstance(path, str):
        return path if path == written else {"source": path, "name": written}
    if path == written or not isinstance(path, Mapping) or path.get("name"):
        return path
    return {**path, "name": written["source"]}


def _is_path(value: str, at: tuple[str, ...]) -> bool:
    if at[:1] and at[0] in REWARD_SETTINGS:  # a folder called `strict` is no `kind: strict`
        return "/" in value or bool(Path(value).suffix)
    return at in _PATHS or at[:2] == ("teachers", "folders")


def _code(value: Any, place: PlaceOf) -> Any:
    """FILE.py or FILE.py:NAME with the full path of the file."""
    code = own_name(value)
    if code is None:
        return value
    return code._replace(file=_moved(code.file, place)).text


def _moved(value: str, place: PlaceOf) -> str:
    if value.startswith((PACKAGE, "~", "/")) or not value.strip():
        return value
    named = own_file(Path(value))
    if named is not None and _exists(named) and (not _exists(Path(value)) or named.samefile(value)):
        return value  # a file of flowrl, found from every folder
    return place(value)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no file can have this name
        return False
