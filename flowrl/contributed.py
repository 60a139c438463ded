"""Contributed recipes by name: the one door between `flowrl.contrib` and everything else.

A file of that folder holds the recipe of its name and the parts that only this recipe has. It is
imported when a run names the recipe, or a part that the rest of flowrl does not have; the names
alone are read from the folder.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from flowrl.errors import feature_files

CONTRIB = Path(__file__).resolve().parent / "contrib"


@cache
def contributed_names() -> tuple[str, ...]:
    """Names of the contributed recipes, in alphabetical order; none without the folder."""
    return tuple(sorted(info.name for info in iter_modules([str(CONTRIB)])))


def contributed_recipe(name: str) -> Callable[..., Any]:
    """The contributed recipe of this name."""
    return getattr(_module(name), name)


@cache
def contributed_modules() -> tuple[ModuleType, ...]:
    """All contributed files, imported."""
    return tuple(_module(name) for name in contributed_names())


def contributed_part(name: str) -> Any:
    """The class of this name in a contributed file. AttributeError if there is none."""
    for module in contributed_modules():
        part = vars(module).get(name)
        if isinstance(part, type) and part.__module__ == module.__name__:
            return part
    raise AttributeError(f"no file of {CONTRIB} has a part {name}")


def _module(name: str) -> ModuleType:
    with feature_files("samplers.routes", name):
        return import_module(f"flowrl.contrib.{name}")
