"""Settings that differ from their defaults, found without importing any file that a run names

A page may be made of anybody's folder, so a recipe of a user's own file is not run for it: all of
its settings count as chosen.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic_core import PydanticUndefined

from flowrl.settings import Run
from flowrl.settings.recipe import RECIPE_SETTINGS

_PLAIN = TypeAdapter[Any](Any)


def chosen_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's settings that differs from the defaults or has none, as a tree of plain
    data."""
    known = _defaults(Run)
    recipe = settings.get("recipe")
    name = recipe.get("name") if isinstance(recipe, Mapping) else None
    if isinstance(name, str) and name in RECIPE_SETTINGS:
        known["recipe"] = {**_defaults(RECIPE_SETTINGS[name]), "name": PydanticUndefined}
    return _differing(settings, known)


def _defaults(kind: type[BaseModel]) -> dict[str, Any]:
    """Defaults by the names in a file; those of its own fields for a part without a default."""
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        value = field.get_default(call_default_factory=True, validated_data={})
        part = field.annotation
        if value is not PydanticUndefined:
            found[field.alias or name] = _PLAIN.dump_python(value, mode="json", by_alias=True)
        elif isinstance(part, type) and issubclass(part, BaseModel):
            found[field.alias or name] = _defaults(part)
    return found


def _differing(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        default = known.get(name, PydanticUndefined)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := _differing(value, default):
                found[name] = inner
        elif value != default:
            found[name] = value
    return found
