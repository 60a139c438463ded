"""Settings of rewards and of a run's parts, read from the signatures of their functions."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from rewards.types import INLINE

NAMES_ELSEWHERE = {  # names elsewhere, without separators
    "hpsv2": "hps", "hpsv21": "hps", "hpsscore": "hps", "clipscore": "clip", "pick": "pickscore",
    "aestheticscore": "aesthetic", "vlm": "judge", "compressibility": "jpeg",
}  # fmt: skip


def function_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters of a function; quoted annotations stay strings if they cannot be evaluated."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except NameError:  # names that are imported for type checkers only
        return inspect.signature(function).parameters


def settings_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters of a function, with each `Inline` one replaced by its fields."""
    settings: dict[str, inspect.Parameter] = {}
    for name, parameter in function_parameters(function).items():
        group = _group(parameter)
        settings |= {name: parameter} if group is None else function_parameters(group)
    return settings


def call_with(function: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """Call a function with checked settings; settings of a group become its dataclass."""
    arguments: dict[str, Any] = {}
    for name, parameter in function_parameters(function).items():
        group = _group(parameter)
        if group is not None:
            arguments[name] = group(**{k: settings[k] for k in settings if k in settings_of(group)})
        elif name in settings:
            arguments[name] = settings[name]
    return function(**arguments)


def inline_groups(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The dataclasses of a function's `Inline` parameters."""
    groups = map(_group, function_parameters(function).values())
    return [group for group in groups if group is not None]


def _group(parameter: inspect.Parameter) -> Callable[..., Any] | None:
    """The dataclass of an `Inline` parameter."""
    marks = getattr(parameter.annotation, "__metadata__", ())
    return parameter.annotation.__origin__ if INLINE in marks else None


def own_settings(
    place: str, function: Callable[..., Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of a user's function or class, converted by its annotations.

    ValueError, which begins with `place`, for an unknown, missing or unsuitable setting.
    """
    return converted_settings(place, function_parameters(function), settings)


def converted_settings(
    place: str, parameters: Mapping[str, inspect.Parameter], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """`own_settings` for these parameters."""
    check_names(place, parameters, settings)
    return {
        name: value_of_type(f"{place}: {name}", value, parameters[name].annotation)
        for name, value in settings.items()
    }


def check_names(
    place: str, parameters: Mapping[str, inspect.Parameter], settings: Mapping[str, Any]
) -> None:
    """ValueError for an unknown or a missing setting."""
    for setting in settings:
        if setting not in parameters:
            raise ValueError(
                f"{place} has no setting {setting!r}" + best_guess(setting, parameters)
            )
    for setting, parameter in parameters.items():
        if parameter.default is parameter.empty and setting not in settings:
            raise ValueError(f"{place} needs the setting {setting!r}")


def value_of_type(place: str, value: Any, annotation: Any) -> Any:
    """Convert the value to the annotation (1 to 1.0, a text to a path). ValueError if that fails.

    Without an annotation, or with one that cannot be checked, the value stays as it is.
    """
    if annotation is inspect.Parameter.empty:
        return value
    try:
        return TypeAdapter(annotation).validate_python(value)
    except PydanticSchemaGenerationError:
        return value
    except ValidationError as error:
        first = error.errors()[0]
        wanted = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        wanted = f"a number {wanted}" if wanted.startswith(("greater", "less")) else wanted
        raise ValueError(f"{place}: expected {wanted}, not {first['input']!r}") from error


def best_guess(wrong: str, names: Iterable[str]) -> str:
    """The end of a message about a wrong name: a name that was probably meant, or all."""
    names = list(names)
    letters = re.sub(r"[\W_]", "", wrong.lower())
    close = [name for name in names if name.replace("_", "") == letters]
    close = close or [name for name in names if name == NAMES_ELSEWHERE.get(letters)]
    close = close or difflib.get_close_matches(wrong, names, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; choose one of {', '.join(names)}" if names else "; there are none"
