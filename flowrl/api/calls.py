"""Arguments of calls that stand for commands: checked as the command line checks its words."""

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from flowrl.errors import UserError
from flowrl.settings.file.plain import texts_of_paths
from flowrl.settings.read import Overrides
from flowrl.settings.words.sentences import plain_message
from flowrl.settings.words.values import short_repr

T = TypeVar("T")
P = ParamSpec("P")
_LISTS = (Sequence, Iterable)


def checked_arguments(
    kind: type[T], values: Mapping[str, Any], options: Mapping[str, Any], at: str
) -> T:
    """The arguments of a command; `options` take precedence over `values`. UserError for an unknown
    option or a value of another type."""
    fields = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if unknown := [name for name in options if name not in fields]:
        raise UserError(f"{at}: options: {unknown[0]!r} is not one of {', '.join(fields)}")
    try:
        return TypeAdapter(kind).validate_python(texts_of_paths({**values, **options}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{at}: {first['loc'][0]}: {plain_message(first)}") from error


def setting_words(settings: Overrides) -> list[str]:
    """Settings as words of a command line: {"train": {"lr": 1e-4}} is --train.lr=0.0001."""
    if not isinstance(settings, Mapping):
        return list(settings)
    words = list[str]()
    for section, value in settings.items():
        inner = value.items() if isinstance(value, Mapping) and value else None
        pairs = (
            [(f"{section}.{name}", entry) for name, entry in inner] if inner else [(section, value)]
        )
        words += [f"--{name}={_word(entry)}" for name, entry in pairs]
    return words


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(texts_of_paths(value))


def public_call(function: Callable[P, T]) -> Callable[P, T]:
    """A function of the Python API, which answers arguments that it does not have, and paths and
    lists that are none, with a UserError in place of a TypeError from within."""
    return _checked(function, f"flowrl.{function.__name__}", 0)


def public_calls(kind: type[T]) -> type[T]:
    """A class of the Python API, all of whose public methods are as `public_call` makes them."""
    for name, member in list(vars(kind).items()):
        at = f"flowrl.{kind.__name__}" + ("" if name == "__init__" else f".{name}")
        if isinstance(member, classmethod):
            setattr(kind, name, classmethod(_checked(member.__func__, at, 1)))
        elif inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, _checked(member, at, 1))
    return kind


def _checked(function: Callable[P, T], at: str, skipped: int) -> Callable[P, T]:
    """`skipped`: arguments that the caller does not write, such as self."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            raise UserError(f"{at}: {_misfit(signature, len(args), kwargs, skipped)}") from None
        for name, value in list(bound.items())[skipped:]:
            parameter = signature.parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            if wanted := _wanted(parameter.annotation, value):
                raise UserError(f"{at}: {name} must be {wanted}, not {short_repr(value)}")
        return function(*args, **kwargs)

    return call


def _misfit(
    signature: inspect.Signature, count: int, named: Mapping[str, object], skipped: int
) -> str:
    """Why arguments do not fit a signature."""
    parameters = list(signature.parameters.values())[skipped:]
    names = [parameter.name for parameter in parameters]
    placed = [parameter for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    if unknown := [name for name in named if name not in names]:
        near = get_close_matches(unknown[0], names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names) or 'none'}"
        return f"there is no argument {unknown[0][:100]!r}; {hint}"
    if count - skipped > len(placed):
        by_name = [
            parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        ]
        few = f"at most {len(placed)} arguments come" if placed else "no argument comes"
        rest = f"; name the others: {', '.join(by_name)}" if by_name else ""
        return f"{few} without a name{rest}"
    written = {parameter.name for parameter in placed[: count - skipped]}
    if twice := [name for name in named if name in written]:
        return f"{twice[0]} is given twice"
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    missing = [name for name in needed if name not in written and name not in named]
    return f"{' and '.join(missing)} must be given"


def _wanted(annotation: Any, value: object) -> str:
    """The kind of value that an annotation of texts, paths and lists wants; empty for one that
    fits, and for annotations of other kinds, which the call itself checks."""
    members = (
        get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    )
    kinds = [get_origin(member) or member for member in members]
    if bool in kinds and set(kinds) <= {bool, str, Collection}:
        return "" if isinstance(value, bool | str | Collection) else "True, False or names"
    if not all(kind in (str, Path, type(None), *_LISTS) for kind in kinds):
        return ""
    if value is None and type(None) in kinds:
        return ""
    texts = str in kinds or Path in kinds
    lists = any(kind in _LISTS for kind in kinds)
    if (lists and isinstance(value, Iterable)) or (texts and isinstance(value, str | Path)):
        return ""
    one = "a path" if Path in kinds else "a text"
    return f"{one} or a list" if texts and lists else one if texts else "a list"
