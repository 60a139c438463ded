"""Values as JSON that holds data only, rebuilt as exact builtin types by the receiver.

Subclasses of builtin types (a Counter, a named tuple) travel as the builtin type, views of a
dictionary and deques as lists, numpy's arrays and scalars as their numbers. Everything else stays
in its process and is represented by a number.
"""

import collections
import sys
from collections.abc import Callable, Iterator
from typing import Any

CONTAINERS = (list, tuple, set, frozenset)
LISTED = (type({}.keys()), type({}.values()), type({}.items()), collections.deque)


def encode_value(value: Any, hold: Callable[[Any], Any]) -> Any:
    """The value as JSON; `hold` returns the JSON for what is not plain data."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if isinstance(value, complex):
        return {"complex": [float.__repr__(value.real), float.__repr__(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    for kind in CONTAINERS:
        if isinstance(value, kind):
            return {kind.__name__: [encode_value(one, hold) for one in value]}
    if isinstance(value, LISTED):
        return {"list": [encode_value(one, hold) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[encode_value(k, hold), encode_value(v, hold)] for k, v in value.items()]}
    if _is_array(value) and value.dtype.kind in "biufc":
        if value.shape == ():
            return encode_value(value.item(), hold)
        return {"array": [value.dtype.str, encode_value(value.tolist(), hold)]}
    return hold(value)


def decode_value(value: Any, held: Callable[[Any], Any]) -> Any:
    """The value of exact builtin types (or an array); `held` returns what stands for a number."""
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is not dict:
        raise ValueError("a message is not an encoded value")
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {decode_value(k, held): decode_value(v, held) for k, v in inner}
    for plain in CONTAINERS:
        if kind == plain.__name__:
            return plain(decode_value(one, held) for one in inner)
    if kind == "array":
        return _array(inner[0], decode_value(inner[1], held))
    made: dict[str, Callable[[Any], Any]] = {
        "int": lambda text: int(text, 16),
        "float": float,
        "complex": lambda pair: complex(float(pair[0]), float(pair[1])),
        "bytes": bytes.fromhex,
        "range": lambda three: range(*three),
    }
    return made[kind](inner) if kind in made else held(value)


def _is_array(value: Any) -> bool:
    """Whether it is an array or a scalar of numpy, which need not be imported."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _array(dtype: str, content: Any) -> Any:
    import numpy as np

    return np.array(content, dtype=np.dtype(dtype))


def refuse_nan(value: Any) -> Any:
    """The value, unless it is or holds NaN: then AssertionError, since NaN has no order."""
    for number in _numbers(value):
        if number != number:
            raise AssertionError("NaN cannot be compared by size")
    return value


def _numbers(value: Any) -> Iterator[Any]:
    if isinstance(value, float | complex):
        yield value
    elif _is_array(value) and value.dtype.kind in "fc":
        yield from value.ravel().tolist()
    elif type(value) in (list, tuple):
        for one in value:
            yield from _numbers(one)
