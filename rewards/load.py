"""Name to reward. The folder is the registry: `rewards/<name>.py` with a function `load`.

`load(**settings)` of such a file gives a `Reward`; heavy libraries are imported inside it only.
"""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rewards.types import Reward

FOLDERS = [str(Path(__file__).parent)]
PLUMBING = frozenset({"combine", "load", "types"})


def names() -> list[str]:
    """All rewards of the folder."""
    found = {module.name for module in pkgutil.iter_modules(FOLDERS)}
    return sorted(found - PLUMBING)


def load(name: str, **settings: Any) -> Reward:
    """The reward `name`. ValueError for an unknown name or setting, before anything is loaded."""
    check(name, settings)
    return _loader(name)(**settings)


def check(name: str, settings: Mapping[str, Any]) -> None:
    """ValueError if `name` is no reward, or takes no such settings, or lacks one. Loads nothing."""
    parameters = inspect.signature(_loader(name)).parameters
    place = f"reward {name!r}"
    for setting in settings:
        if setting not in parameters:
            raise ValueError(f"{place} has no setting {setting!r}" + _guess(setting, parameters))
    for setting, parameter in parameters.items():
        if parameter.default is parameter.empty and setting not in settings:
            raise ValueError(f"{place} needs the setting {setting!r}")


def _loader(name: str) -> Callable[..., Reward]:
    if name not in names():
        raise ValueError(f"there is no reward {name!r}" + _guess(name, names()))
    module = importlib.import_module(f"rewards.{name}")
    if "load" not in vars(module):
        raise ValueError(f"rewards/{name}.py has no function 'load'; add one that gives the reward")
    return module.load


def _guess(wrong: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(wrong, known, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(known)}" if known else "; it takes none"
