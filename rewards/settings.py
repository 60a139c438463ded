"""Types of settings: ranges that the loader checks, and groups that several rewards share."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field

T = TypeVar("T")

OneOrMore = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]

_INLINE = "its fields are settings of the reward"
Inline = Annotated[T, _INLINE]
"""Annotation of a parameter that takes a dataclass, whose fields are settings of the reward."""


def function_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters; annotations in quotes stay texts where they cannot be evaluated."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except NameError:  # names that are imported for type checkers only
        return inspect.signature(function).parameters


def settings_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters, with the fields of each `Inline` one in its place."""
    settings: dict[str, inspect.Parameter] = {}
    for name, parameter in function_parameters(function).items():
        group = _group(parameter)
        settings |= {name: parameter} if group is None else function_parameters(group)
    return settings


def call_with(function: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """Call the function with checked settings; those of a group become its dataclass."""
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
    return parameter.annotation.__origin__ if _INLINE in marks else None
