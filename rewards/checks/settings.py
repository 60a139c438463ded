"""Settings of rewards and of a run's parts, read from the signatures of their functions."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rewards.types import INLINE


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
    given: dict[str, Any] = {}
    for name, parameter in function_parameters(function).items():
        group = _group(parameter)
        if group is not None:
            given[name] = group(**{k: settings[k] for k in settings if k in settings_of(group)})
        elif name in settings:
            given[name] = settings[name]
    return function(**given)


def _group(parameter: inspect.Parameter) -> Callable[..., Any] | None:
    """The dataclass of an `Inline` parameter."""
    marks = getattr(parameter.annotation, "__metadata__", ())
    return parameter.annotation.__origin__ if INLINE in marks else None
