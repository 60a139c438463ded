"""`flowrl recipes`: the table of recipes, and one recipe with its settings."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml

from flowrl.errors import UserError
from flowrl.recipes import RECIPES
from flowrl.settings import recipe_function, recipe_kind
from flowrl.settings.parts.own_parts import FILE_AND_NAME, RECIPE_PARTS, parts_written
from flowrl.settings.sections.joint import JOINT, JointSettings
from rewards.checks.settings import function_parameters

FORMS = "NAME, {name: NAME, ...settings} or FILE.py:NAME"


def recipes_command(arguments: list[str]) -> int:
    """Print the table of recipes, or one recipe with the types, defaults and source of its
    settings."""
    if not arguments:
        width = max(map(len, RECIPES))
        for name, recipe in RECIPES.items():
            print(f"{name:<{width}}  {(recipe.__doc__ or '').strip().splitlines()[0]}")
        print(
            f"{JOINT:<{width}}  A language model writes an image model's prompts; both can be "
            "trained."
        )
        return 0
    name, *others = arguments
    if others:
        raise UserError(f"recipes: give a single recipe, not {' '.join(arguments)[:200]}")
    if name == JOINT:
        print(f"{name}: {inspect.cleandoc(JointSettings.__doc__ or '')}")
        return 0
    try:
        words = recipe_function(name).__doc__ or "your own recipe, without a docstring"
    except UserError as error:
        raise UserError(f"recipes: {error}") from error
    print(f"{name}: {inspect.cleandoc(words)}\n")
    rows = recipe_rows(name)
    width = max(len(key) for key, _, _ in rows)
    for key, kind, default in rows:
        print(f"  {key:<{width}}  {default}  ({kind})")
    print(f"\nIts parts, each of which a run file can replace by {FORMS}:\n")
    for key, part in parts_written(recipe_kind(name)(name=name).algorithm()).items():
        print(f"  {key}: {in_yaml(part)}")
    return 0


def recipe_rows(name: str, parts: bool = False) -> list[tuple[str, str, str]]:
    """Setting, type and default of a recipe, as written in YAML. `parts`: also those that every
    recipe has, such as the parts that it lets you replace."""
    own = function_parameters(recipe_function(name))
    fields = {k: f for k, f in recipe_kind(name).model_fields.items() if k != "name"}
    forms = {k: FORMS if k in RECIPE_PARTS else readable(f.annotation) for k, f in fields.items()}
    rows = [(k, readable(f.annotation), in_yaml(f.default)) for k, f in fields.items() if k in own]
    return rows + [(key, form, "null") for key, form in forms.items() if parts and key not in own]


def readable(kind: Any) -> str:
    """A type in words: "group, batch or null" for Literal["group", "batch"] | None."""
    parts = get_args(kind)
    if FILE_AND_NAME in parts:
        return FILE_AND_NAME
    if kind is type(None):
        return "null"
    if get_origin(kind) is Annotated:
        return readable(parts[0])
    if get_origin(kind) in (Sequence, Mapping, dict):
        many = "list of" if get_origin(kind) is Sequence else "names to"
        return f"{many} {readable(parts[-1])}"
    if get_origin(kind) is tuple:
        each = [readable(part) for part in parts if part is not Ellipsis]
        return f"list of {each[0]}" if Ellipsis in parts else f"[{', '.join(each)}]"
    if get_origin(kind) is Literal:
        *most, last = map(in_yaml, parts)
        return f"{', '.join(most)} or {last}" if most else last
    if parts:
        return " or ".join(readable(part) for part in parts)
    return kind.__name__


def in_yaml(value: Any) -> str:
    """A value as YAML on one line: null, true, [0, 3], 0.7."""
    return yaml.safe_dump([value], default_flow_style=True, width=1000, sort_keys=False).strip()[
        1:-1
    ]
