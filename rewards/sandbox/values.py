"""Encode values as JSON that holds only data; the receiver rebuilds exact builtin types.

Subclasses of builtin types (a Counter, a named tuple) travel as the builtin type, views of a
dictionary as lists, numpy's arrays and scalars as their numbers; deques, decimals, fractions, dates
and times as themselves. Everything else stays in its process and is represented by a number.
"""

from __future__ import annotations

import collections
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator

TYPE_CHECKING = False  # typing itself takes a tenth of a program's start
if TYPE_CHECKING:
    from typing import Any

CONTAINERS = (list, tuple, set, frozenset)
LISTED = (type({}.keys()), type({}.values()), type({}.items()))
OF_LIBRARY: dict[tuple[str, str], Callable[[Any], list[Any]]] = {
    ("decimal", "Decimal"): lambda value: [str(value)],
    ("fractions", "Fraction"): lambda value: [f"{value.numerator}/{value.denominator}"],
    ("datetime", "timedelta"): lambda value: [value.days, value.seconds, value.microseconds],
    ("datetime", "datetime"): lambda value: [
        *(value.year, value.month, value.day, value.hour, value.minute, value.second),
        value.microsecond,
    ],
    ("datetime", "date"): lambda value: [value.year, value.month, value.day],
    ("datetime", "time"): lambda value: [
        *(value.hour, value.minute, value.second, value.microsecond),
    ],
}
"""Types that travel, each with the arguments that make an equal value. Time zones do not."""
ARRAY_TYPES = re.compile(r"[<>|=][biufc]\d{1,2}")
"""Types of arrays of numpy that travel: numbers of a size. A program can write anything into its
messages, so their reader takes these alone too."""


def encode_value(value: Any, hold: Callable[[Any], Any]) -> Any:
    """Encode a value as JSON; `hold` returns the JSON for values that are not plain data."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if (scalar := _encode_scalar(value)) is not None:
        return scalar
    for kind in CONTAINERS:
        if isinstance(value, kind):
            return {kind.__name__: [encode_value(one, hold) for one in value]}
    if isinstance(value, LISTED):
        return {"list": [encode_value(one, hold) for one in value]}
    if isinstance(value, collections.deque):
        return {"deque": [encode_value(one, hold) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[encode_value(k, hold), encode_value(v, hold)] for k, v in value.items()]}
    if _is_array(value) and ARRAY_TYPES.fullmatch(value.dtype.str):
        if value.shape == ():
            return encode_value(value.item(), hold)
        return {"array": [value.dtype.str, encode_value(value.tolist(), hold)]}
    return hold(value)


def _encode_scalar(value: Any) -> dict[str, Any] | None:
    if isinstance(value, complex):
        return {"complex": [float.__repr__(value.real), float.__repr__(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    kind_name = type(value).__module__, type(value).__name__
    if kind_name in OF_LIBRARY and getattr(value, "tzinfo", None) is None:
        return {".".join(kind_name): OF_LIBRARY[kind_name](value)}
    return None


def decode_value(
    value: Any, held: Callable[[Any], Any], array: Callable[[str, Any], Any] | None = None
) -> Any:
    """Decode a value of exact builtin types (or an array); `held` resolves numbers of held
    objects."""

    def decoded(one: Any) -> Any:
        return decode_value(one, held, array)

    if value is None or type(value) in (bool, str):
        return value
    if type(value) is not dict:
        raise ValueError("the message is not an encoded value")
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {decoded(k): decoded(v) for k, v in inner}
    for plain in CONTAINERS:
        if kind == plain.__name__:
            return plain(decoded(one) for one in inner)
    if kind == "array":
        if not ARRAY_TYPES.fullmatch(inner[0]):
            raise ValueError("the message is not an encoded value")
        return (array or plain_array)(inner[0], decoded(inner[1]))
    module, _, name = kind.partition(".")
    if (module, name) in OF_LIBRARY:
        return getattr(importlib.import_module(module), name)(*map(_plain, inner))
    makers: dict[str, Callable[[Any], Any]] = {
        "deque": lambda items: collections.deque(decoded(one) for one in items),
        "int": lambda text: int(text, 16),
        "float": float,
        "complex": lambda pair: complex(float(pair[0]), float(pair[1])),
        "bytes": bytes.fromhex,
        "range": lambda three: range(*three),
    }
    return makers[kind](inner) if kind in makers else held(value)


def _plain(value: Any) -> Any:
    if type(value) not in (int, str):
        raise ValueError("the message is not an encoded value")
    return value


def _is_array(value: Any) -> bool:
    """Whether the value is a numpy array or scalar, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def plain_array(dtype: str, content: Any) -> Any:
    import numpy as np

    return np.array(content, dtype=np.dtype(dtype))


def judged_array(dtype: str, content: Any) -> Any:
    """Wrap an array so that an empty one only equals empty values.

    `all` of no comparisons is true, so an empty array would otherwise equal any number.
    """
    import numpy as np

    array = plain_array(dtype, content)
    if array.size:
        return array

    class Empty(np.ndarray):
        def __array_ufunc__(self, ufunc: Any, method: Any, *inputs: Any, **named: Any) -> Any:
            if ufunc.__name__ in COMPARISONS:
                _refuse_full(inputs)
            return super().__array_ufunc__(ufunc, method, *inputs, **named)

        def __eq__(self, other: Any) -> Any:
            _refuse_full([vars(other).get("expected", other)] if _is_approx(other) else [other])
            return super().__eq__(other)

        __hash__ = None

        @property
        def flat(self) -> Any:  # what pytest.approx compares, item by item
            raise AssertionError("an empty array is compared with a value")

    return array.view(Empty)


COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "isclose")


def _is_approx(value: Any) -> bool:
    return type(value).__name__.startswith("Approx")


def _refuse_full(values: Iterable[Any]) -> None:
    import numpy as np

    if any(np.size(value) for value in values):
        raise AssertionError("an empty array is compared with a value")


def refuse_nan(value: Any) -> Any:
    """Return the value, or raise AssertionError if it contains NaN, which cannot be ordered."""
    for number in _numbers(value):
        if number != number:
            raise AssertionError("NaN cannot be ordered")
    return value


def ordered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `max`, `min` or `sorted` refuse NaN, which would be skipped or break the order."""

    def guarded(*arguments: Any, **named: Any) -> Any:
        values = list(arguments[0]) if len(arguments) == 1 else list(arguments)
        key = named.get("key")
        refuse_nan(values)
        if key is not None:
            refuse_nan([key(one) for one in values])
        return function(values, **named)

    return guarded


def _numbers(value: Any) -> Iterator[Any]:
    if isinstance(value, float | complex):
        yield value
    elif _is_array(value) and value.dtype.kind in "fc":
        yield from value.ravel().tolist()
    elif type(value) in (*CONTAINERS, collections.deque):
        for one in value:
            yield from _numbers(one)
