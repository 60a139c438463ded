"""Arguments of calls that stand for commands: checked as the command line checks its words."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from flowrl.errors import UserError
from flowrl.settings.file.plain import texts_of_paths
from flowrl.settings.read import Overrides
from flowrl.settings.words.sentences import plain_message

T = TypeVar("T")


def checked_arguments(
    kind: type[T], values: Mapping[str, Any], options: Mapping[str, Any], at: str
) -> T:
    """The arguments of a command; `options` take precedence over `values`. UserError for an unknown
    option or a value of another type."""
    known = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if unknown := [name for name in options if name not in known]:
        raise UserError(f"{at}: options: {unknown[0]!r} is not one of {', '.join(known)}")
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
            [(f"{section}.{name}", each) for name, each in inner] if inner else [(section, value)]
        )
        words += [f"--{name}={_word(each)}" for name, each in pairs]
    return words


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(texts_of_paths(value))
