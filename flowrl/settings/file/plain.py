"""Values from Python as a run file can have them."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from flowrl.errors import UserError
from flowrl.settings.file.strict_yaml import LARGEST_INTEGER
from flowrl.settings.words.values import short_repr


def texts_of_paths(value: Any) -> Any:
    """The value with paths, at any depth, as texts: wherever a file's name is read, a
    `pathlib.Path` is read too."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {name: texts_of_paths(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [texts_of_paths(item) for item in value]
    return value


def check_integers(value: Any, at: str = "") -> None:
    """UserError, with the setting, for an integer that the reader of run files refuses: the run
    could not be read from its own run.yaml."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            check_integers(item, f"{at}.{name}" if at else str(name))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_integers(item, f"{at}.{i}")
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise UserError(
            f"{at}: {short_repr(value)} is too large: use an integer from -2**63 to 2**63"
        )
