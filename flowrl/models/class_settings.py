"""Settings for the constructor of a library's class."""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from flowrl.errors import UserError


def check_keys(place: str, kind: type, settings: Mapping[str, Any]) -> None:
    """UserError, which begins with `place`, for a setting that a class's constructor lacks."""
    names = [k for k in inspect.signature(kind.__init__).parameters if k not in ("self", "kwargs")]
    if strange := [name for name in settings if name not in names]:
        close = get_close_matches(strange[0], names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError(f"{place} has no setting {strange[0]!r}: {hint}It has {', '.join(names)}")
