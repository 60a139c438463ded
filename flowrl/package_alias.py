"""Bind the names `rewards` and `samplers` to the packages next to this one.

A user's folder may have a `rewards.py` or a `samplers.py`, and the working folder comes first on
the import path of `python -m`, notebooks and pytest.
"""

import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PACKAGES = ("rewards", "samplers")
FOLDER = Path(__file__).resolve().parent.parent


class _BesideFlowrl:
    """Finds the two packages, and nothing else, in the folder that contains flowrl."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Import spec of one of the two packages; None for all other names."""
        return PathFinder.find_spec(name, [str(FOLDER)]) if name in PACKAGES else None


def bind_packages() -> None:
    """Make every later `import rewards` and `import samplers` mean flowrl's own packages; imports
    neither.

    A user's module of the same name that is already imported stays in use where it was imported; a
    warning names it, since later imports find flowrl's package.
    """
    for name in PACKAGES:
        loaded = sys.modules.get(name)
        if loaded is None or _is_ours(name, loaded):
            continue
        for key in [key for key in sys.modules if key.partition(".")[0] == name]:
            del sys.modules[key]
        warnings.warn(
            f"from now on `import {name}` means flowrl's package instead of {loaded.__file__}, "
            "which was imported before; rename your file to import it again",
            stacklevel=3,
        )
    if not any(isinstance(finder, _BesideFlowrl) for finder in sys.meta_path):
        # before the search of the path, and behind the finders of tools that wrap it
        place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0
        sys.meta_path.insert(place, _BesideFlowrl())


def _is_ours(name: str, module: ModuleType) -> bool:
    """Whether a module is the package next to flowrl; a folder without code has no file."""
    return module.__file__ is not None and Path(module.__file__).resolve().parent == FOLDER / name
