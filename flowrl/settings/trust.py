"""Run folders from elsewhere: their run.yaml may name code, which runs with the user's rights.

A folder that this user started on this machine, or has trusted, is recorded by its path. From any
other folder nothing is imported unless `--trust` is given. A run file named on the command line is
trusted: see SECURITY.md.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.paths import CONFIGS_FOLDER, PROJECT, find

STATE_VARIABLE = "FLOWRL_STATE"
CODE = re.compile(r"(.+\.py)(:\w+)?")
REWARD_SETTINGS = ("rewards", "held_out_rewards", "intermediate_rewards", "way_rewards")
_OWN = (PROJECT / "flowrl", PROJECT / "rewards", CONFIGS_FOLDER)
_remembered: set[Path] = set()  # also where the user's folder cannot be written


def code_named(value: Any) -> Iterator[str]:
    """Names FILE.py or FILE.py:NAME at any depth, except files included in flowrl."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from code_named(each)
    elif isinstance(value, str) and (match := CODE.fullmatch(value)) is not None:
        path = find(match[1]).resolve()
        if not any(path.is_relative_to(folder.resolve()) for folder in _OWN):
            yield value


def trusted(folder: Path, tree: Any) -> bool:
    """Whether a run's folder was started here, is trusted, or names no code."""
    return begun_here(folder) or next(code_named(tree), None) is None


def check_trusted(folder: Path, tree: Any, rewards: bool) -> None:
    """UserError if the settings of a folder from elsewhere name code.

    `rewards`: also check the code of rewards, which is not imported until they are opened."""
    if not rewards and isinstance(tree, Mapping):
        tree = {key: value for key, value in tree.items() if key not in REWARD_SETTINGS}
    names = [] if begun_here(folder) else list(dict.fromkeys(code_named(tree)))
    if names:
        raise UserError(
            f"{folder} was not started here, and its run.yaml names code "
            f"({', '.join(names)[:300]}) that would run with your rights: read it, then add "
            "--trust (from Python trust=True)"
        )


def begun_here(folder: Path) -> bool:
    """Whether `remember` was called for a folder at this path."""
    path = folder.resolve()
    return path in _remembered or _mark(path).is_file()


def remember(folder: Path) -> None:
    """Record that a folder was started here or is trusted."""
    path = folder.resolve()
    _remembered.add(path)
    mark = _mark(path)
    with suppress(OSError):  # then `--trust` is asked for
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(f"{path}\n")


def _mark(path: Path) -> Path:
    place = os.environ.get(STATE_VARIABLE)
    home = os.environ.get("XDG_STATE_HOME") or str(Path("~/.local/state").expanduser())
    folder = Path(place) if place else Path(home) / "flowrl"
    return folder / "runs" / hashlib.sha256(str(path).encode()).hexdigest()[:32]
