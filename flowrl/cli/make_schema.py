"""The schema of `flowrl.cli.schema`, made from the types: dataclasses, settings, functions."""

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, with_config

from flowrl.cli.command_table import COMMANDS, RECIPE_NAME
from flowrl.cli.recipe_text import in_yaml, part_rows, recipe_rows
from flowrl.cli.reward_text import first_sentence, reward_needs, reward_rows, scored_media
from flowrl.recipes import RECIPES
from flowrl.recipes.meanings import recipe_words
from flowrl.settings import RunSettings
from flowrl.settings.command_line.arguments import field_types, word_fields
from flowrl.settings.command_line.options import Option
from flowrl.settings.model.kinds import MODEL_KINDS
from flowrl.settings.parts.meanings import part_words
from flowrl.settings.parts.names import part_name, parts_named
from flowrl.settings.parts.own_parts import KINDS, RECIPE_PARTS, parts_of_recipes
from flowrl.settings.words.names import BASE_KEY, WORDS
from flowrl.settings.words.sentences import fields_of, kinds_at
from flowrl.settings.words.short_forms import FOR_A_SECTION
from rewards.load import names
from rewards.meanings import reward_wants

_BASE = (
    "Another run file that these settings extend: a path relative to this file, or configs/... of "
    "flowrl. Mappings are merged; lists and other values replace the base's."
)


def make_schema() -> dict[str, Any]:
    return {
        "commands": {
            name: _command(command.words) for name, command in COMMANDS.items() if command.words
        },
        "settings": list(_settings((RunSettings,), "")),
        "recipes": {
            name: {
                "about": recipe_words(recipe),
                "settings": recipe_rows(name, parts=True),
            }
            for name, recipe in RECIPES.items()
        },
        "parts": {
            part_name(kind): {"about": part_words(kind), "settings": part_rows(kind)}
            for kind in parts_of_recipes()
        },
        "rewards": {name: _reward(name) for name in names()},
        "words": [asdict(word) for word in WORDS],
        "run": run_schema(),
    }


def _command(place: str) -> dict[str, Any]:
    """A command's docstring and its words, from the dataclass `module:Class` of its arguments."""
    module, _, name = place.partition(":")
    kind = getattr(importlib.import_module(module), name)
    documented = with_config(ConfigDict(use_attribute_docstrings=True))(kind)
    abouts = TypeAdapter(documented).json_schema().get("properties", {})
    types, alone, words = field_types(kind), word_fields(kind), []
    for field in fields(kind):
        about = abouts[field.name].get("description")
        word = _entry(field.name, types[field.name], field.default, about)
        if word["flag"] or field.name in alone:
            word["default"] = ""
        if field.name in alone:
            word["name"] = field.name.upper()
        words.append(word)
    return {"about": " ".join((inspect.getdoc(kind) or "").split()), "words": words}


def _settings(section: Sequence[type[BaseModel]], at: str) -> Iterator[dict[str, Any]]:
    """Each setting of a run as a command-line option; for the recipe, only its name."""
    for key, field in fields_of(section).items():
        name = at + (field.alias or key)
        kinds = Option((name,), field.annotation).kinds
        inner = kinds_at(field.annotation)
        if name == "recipe":
            yield _entry(RECIPE_NAME, str, MISSING, None)
            continue
        below = bool(inner) and tuple not in kinds
        if below:
            yield from _settings(inner, f"{name}.")
        if not below or int in kinds:  # one number may stand for the section
            default = MISSING if field.is_required() or field.default_factory else field.default
            yield _entry(name, field.annotation, default, field.description)


def _entry(name: str, annotation: Any, default: Any, about: str | None) -> dict[str, Any]:
    plain = default is None or isinstance(default, bool | int | float | tuple | list)
    shown = in_yaml(default) if plain and default != () else ""
    return {
        "name": f"--{name.replace('_', '-')}",
        "default": default if isinstance(default, str) else shown,
        "about": " ".join((about or "").split()),
        "choices": list(_choices(annotation)),
        "flag": annotation in (bool, bool | str),
    }


def _choices(annotation: Any) -> Iterator[str]:
    """The values of the Literals in an annotation."""
    for part in get_args(annotation):
        if get_origin(annotation) is Literal:
            yield str(part)
        else:
            yield from _choices(part)


def _reward(name: str) -> dict[str, Any]:
    """A reward's first sentence, what it scores and needs, and its settings; of its judge too."""
    wants = reward_wants(name)
    return {
        "about": first_sentence(name),
        "scores": scored_media(name),
        "needs": reward_needs(name, wants[0]),
        "settings": {want: reward_rows(name, want) for want in wants},
    }


def run_schema() -> dict[str, Any]:
    """The JSON schema of a run file. Required settings are only required in files without a
    base."""
    schema = RunSettings.model_json_schema(by_alias=True)
    prompts = schema["$defs"]["PromptFiles"]
    named = {"not": {"type": "object"}}  # a short form, which is the training prompts
    whole_prompts = {
        "anyOf": [named, {"required": ["source"]}, {"required": prompts.pop("required")}]
    }
    drawn = {"properties": {"prompts": whole_prompts}}
    whole = {
        "required": schema.pop("required"),
        "anyOf": [{"required": ["given"]}, drawn],  # given samples have prompts
        "properties": {"recipe": {"anyOf": [{"type": "string"}, {"required": ["name"]}]}},
    }
    whole["properties"]["model"] = {
        "anyOf": [{"type": "string"}, *({"required": [kind.KIND]} for kind in MODEL_KINDS)]
    }
    for kind in MODEL_KINDS:  # without its name, a model's settings fit several kinds
        schema["$defs"][kind.__name__].pop("required")
    recipes = schema["properties"]["recipe"]
    for part in recipes["anyOf"]:  # without its name, a recipe's settings fit several recipes
        if "oneOf" in part:
            part["anyOf"] = part.pop("oneOf")
            part.pop("discriminator")
    _describe_parts(schema["$defs"])
    _describe_rewards(schema["$defs"]["RewardSpec"])
    for section, short in FOR_A_SECTION.items():
        whole_section = schema["properties"][section]
        schema["properties"][section] = {"anyOf": [whole_section, short]}
    schema["properties"] = {
        BASE_KEY: {"type": "string", "minLength": 1, "description": _BASE, "title": "Base"},
        **schema["properties"],
    }
    return schema | {"if": {"not": {"required": [BASE_KEY]}}, "then": whole}


def _describe_parts(definitions: dict[str, Any]) -> None:
    """Describe the settings of parts where recipes take them, for editors: once `name` is written,
    they complete and explain the settings of that part. Other names stay allowed."""
    kinds = RECIPE_PARTS | {kind.word: kind for kind in KINDS if kind.word in _PARTS_OF_PARTS}
    for place, kind in kinds.items():
        used = False
        for name in RECIPES:
            setting = definitions[name]["properties"].get(place, {})
            used |= _refer(setting.get("anyOf", []), f"#/$defs/{_definition(place)}")
        if used:
            definitions[_definition(place)] = _part_schema(parts_named(kind.protocol).plain)


def _describe_rewards(spec: dict[str, Any]) -> None:
    """Describe the settings of each reward for editors, beside its name and within `settings`.
    Names of a user's file and other settings stay allowed."""
    spec["properties"]["name"]["description"] = f"{', '.join(names())}, or FILE.py:FUNCTION"
    fields, chosen = set(spec["properties"]), list[dict[str, Any]]()
    for name in names():
        rows = {r.name: {"description": r.meaning} for r in reward_rows(name)}
        beside = {setting: about for setting, about in rows.items() if setting not in fields}
        condition = {"required": ["name"], "properties": {"name": {"const": name}}}
        described = {**beside, "settings": {"properties": rows}}
        chosen.append({"if": condition, "then": {"properties": described}})
    spec["allOf"] = chosen


_PARTS_OF_PARTS = ("kernel", "solver")  # which recipes take as settings of their own
_ANY_MAPPING = {"additionalProperties": True, "type": "object"}


def _definition(place: str) -> str:
    return f"part of {place}"


def _refer(forms: list[dict[str, Any]], definition: str) -> bool:
    """Put a reference in place of the mapping of any keys among the forms of a setting, also of a
    list's entries. Returns whether there was one."""
    replaced = False
    for i, form in enumerate(forms):
        if form == _ANY_MAPPING:
            forms[i] = {"$ref": definition}
            replaced = True
        else:
            replaced |= _refer(form.get("items", {}).get("anyOf", []), definition)
    return replaced


def _part_schema(parts: Mapping[str, type]) -> dict[str, Any]:
    """The schema of `{name: NAME, ...settings}`."""
    names = {"type": "string", "description": f"{', '.join(parts)}, or FILE.py:NAME"}
    chosen = [
        {
            "if": {"required": ["name"], "properties": {"name": {"const": name}}},
            "then": {"properties": {r.name: {"description": r.meaning} for r in part_rows(kind)}},
        }
        for name, kind in parts.items()
    ]
    return _ANY_MAPPING | {"properties": {"name": names}, "allOf": chosen}
