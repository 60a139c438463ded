"""JSON that strict readers take: without NaN and infinity, which Python writes and few others read.

All JSON of this package is written here.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

NOT_FINITE = "not a finite number"  # the key of the object that stands for one, in `exact_text`
_NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def json_text(value: Any, **options: Any) -> str:
    """A JSON text with null for numbers that are not finite. `options` are those of
    `json.dumps`."""
    return json.dumps(_replaced(value, lambda _: None), allow_nan=False, **options)


def exact_text(value: Any) -> str:
    """A JSON text from which `read_exact` restores numbers that are not finite."""
    return json.dumps(_replaced(value, lambda number: {NOT_FINITE: str(number)}), allow_nan=False)


def read_exact(text: str) -> Any:
    """Read a text of `exact_text`, or of an older version, which wrote NaN and Infinity.
    ValueError if it is not JSON."""
    return json.loads(text, object_hook=restored_number)


def not_finite(values: Mapping[str, Any]) -> int:
    """The number of values that are not finite."""
    return sum(isinstance(value, float) and not math.isfinite(value) for value in values.values())


def restored_number(tree: dict[str, Any]) -> Any:
    """The number that an object of `exact_text` stands for; any other object as it is."""
    name = tree.get(NOT_FINITE)
    return _NAMES[name] if tree.keys() == {NOT_FINITE} and name in _NAMES else tree


def _replaced(value: Any, other: Any) -> Any:
    if isinstance(value, float):  # numpy's float64 is one
        return value if math.isfinite(value) else other(float(value))
    if isinstance(value, dict):
        return {_key(key): _replaced(item, other) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, other) for item in value]
    return value


def _key(key: Any) -> Any:
    """JSON writes a number as a key in quotes: no reader minds."""
    return str(key) if isinstance(key, float) and not math.isfinite(key) else key
