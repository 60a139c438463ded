"""Values as messages show them."""

import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxlevel = 3


def short_repr(value: Any) -> str:
    """A short form of a value for messages, on one line."""
    return " ".join(_SHORT.repr(value).split())
