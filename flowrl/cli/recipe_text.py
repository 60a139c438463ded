"""`flowrl recipes`: the recipes by evidence, and one recipe with its settings."""

import dataclasses
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import yaml

from flowrl.errors import UserError
from flowrl.recipes import RECIPES
from flowrl.recipes.evidence import SOURCE_KINDS, evidence_of
from flowrl.recipes.meanings import recipe_words
from flowrl.recipes.table import OWN_RECIPES
from flowrl.settings import recipe_function, recipe_kind
from flowrl.settings.command_line.arguments import Word
from flowrl.settings.parts.meanings import part_meanings, part_words
from flowrl.settings.parts.names import item_of, part_name, parts_named, written_part
from flowrl.settings.parts.own_parts import (
    FILE_AND_NAME,
    KINDS,
    RECIPE_PARTS,
    parts_of_recipes,
    parts_written,
)
from flowrl.settings.sections.joint import JOINT, JointSettings
from rewards.checks.settings import function_parameters
from rewards.perception.hub import is_hub_name
from rewards.rights import marks
from rewards.types import Judge, Reward

FORMS = "NAME, {name: NAME, ...settings} or FILE.py:NAME"
WIDTH = 100
PARTS_WORD = "parts"  # the word in place of a recipe for which all parts are listed


class RecipeRow(NamedTuple):
    """A setting of a recipe, as written in YAML."""

    name: str
    kind: str
    default: str
    meaning: str  # empty if its docstring does not describe it


@dataclass
class Recipes:
    """List the algorithms by what they rest on, or print one with the types, defaults and meanings
    of its settings."""

    names: Word[tuple[str, ...]] = ()
    """A recipe, FILE.py:FUNCTION, or a part of recipes, such as `standardize`; `parts` lists all
    parts; without a name, all recipes are listed."""
    all: bool = False
    """Also list contributed recipes, which work like the others."""


def recipe_list(contributed: bool) -> str:
    """The recipes by what they rest on, with what was seen of them."""
    names = RECIPES if contributed else OWN_RECIPES
    width, lines = max(map(len, names)), list[str]()
    for kind, about in SOURCE_KINDS.items():
        rows = [
            f"  {name:<{width}}  {evidence.learned:<16}  {'GPU' if evidence.on_gpu else '':<3}  "
            f"{(names[name].__doc__ or '').strip().splitlines()[0]}"
            for name in names
            if (evidence := evidence_of(names[name])).sources.kind == kind
        ]
        if rows:
            lines += [f"{about}:", *rows, ""]
    lines += [
        "a language model writes an image model's prompts; both can be trained:",
        f"  {JOINT}",
        "",
        "Numbers: gain in a held-out score of a small world, with its 95 % interval over seeds. "
        "GPU: an",
        "iteration on one had the CPU's reward, loss and gradient norm. Figures: "
        "docs/results/methods.md.",
    ]
    if not contributed:
        lines += [f"{len(RECIPES) - len(names)} contributed recipes more: flowrl recipes --all"]
    return "\n".join(lines)


def recipe_text(name: str) -> str:
    """A recipe's docstring, evidence, settings and parts; or a part's docstring and settings.
    UserError for an unknown name."""
    if name == JOINT:
        return f"{name}: {inspect.cleandoc(JointSettings.__doc__ or '')}"
    if name == PARTS_WORD:
        return part_list()
    parts = {part_name(kind): kind for kind in parts_of_recipes()}
    if name in parts and name not in RECIPES:
        return part_text(parts[name])
    try:
        recipe = recipe_function(name)
    except UserError as error:
        if near := get_close_matches(name, [*RECIPES, *parts], n=1):
            raise UserError(
                f"recipes: {name[:100]!r} is no recipe and no part; did you mean {near[0]!r}?"
            ) from error
        raise UserError(f"recipes: {error}") from error
    words = recipe_words(recipe) or "your own recipe, without a docstring"
    lines = [f"{name}: {words}", ""]
    if name in RECIPES:
        lines += [evidence_line(name), ""]
    for row in recipe_rows(name):
        lines.append(f"  {row.name}  {row.default}  ({row.kind})")
        lines += textwrap.wrap(
            row.meaning, WIDTH, initial_indent="      ", subsequent_indent="      "
        )
    lines += ["", f"Its parts, each of which a run file can replace by {FORMS}:", ""]
    algorithm = recipe_kind(name)(name=name).algorithm()
    lines += [f"  {key}: {in_yaml(part)}" for key, part in parts_written(algorithm).items()]
    lines += [
        "",
        f"`flowrl recipes {PARTS_WORD}` lists all parts, `flowrl recipes PART` a part's settings.",
    ]
    average = "" if algorithm.behaviour == "current" else ", an average of the weights"
    return "\n".join([*lines, "", f"Policy that samples: {algorithm.behaviour}{average}."])


def part_list() -> str:
    """All parts by their place in a recipe, each with the first sentence of its docstring."""
    lines, seen = list[str](), set[str]()
    protocols = {place: kind.protocol for place, kind in RECIPE_PARTS.items()}
    protocols |= {kind.word: kind.protocol for kind in KINDS if kind.word in ("kernel", "solver")}
    for place, protocol in protocols.items():
        parts = {n: kind for n, kind in parts_named(protocol).plain.items() if n not in seen}
        width = max(map(len, parts))
        lines += [f"{place}:"]
        lines += [f"  {n:<{width}}  {_first_line(kind)}" for n, kind in parts.items()] + [""]
        seen |= set(parts)
    rest = {part_name(kind): kind for kind in parts_of_recipes() if part_name(kind) not in seen}
    width = max(map(len, rest))
    lines += ["parts of these parts:"]
    lines += [f"  {n:<{width}}  {_first_line(kind)}" for n, kind in rest.items()]
    return "\n".join([*lines, "", "`flowrl recipes PART` lists a part's settings."])


def _first_line(kind: type) -> str:
    """The first sentence of a part's docstring, or its beginning."""
    sentence = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split(". ")[0]
    return textwrap.shorten(sentence.removesuffix("."), WIDTH - 16, placeholder=" ...")


def part_text(kind: type) -> str:
    """A part's docstring without the lines of its settings, and its settings."""
    lines = [f"{part_name(kind)}: {part_words(kind)}", ""]
    for row in part_rows(kind):
        lines.append(f"  {row.name}  {row.default}  ({row.kind})")
        lines += textwrap.wrap(
            row.meaning, WIDTH, initial_indent="      ", subsequent_indent="      "
        )
    return "\n".join(lines).rstrip()


def part_rows(kind: type) -> list[RecipeRow]:
    """The settings of a part."""
    meanings = part_meanings(kind)
    return [
        RecipeRow(name, part_or_value(p.annotation), _default_of(kind, p), meanings.get(name, ""))
        for name, p in function_parameters(kind).items()
    ]


def part_or_value(annotation: Any) -> str:
    """The type of a part's setting in words; FORMS where it is a part."""
    item = item_of(annotation)
    if parts_named(annotation):
        return "part or null" if type(None) in get_args(annotation) else "part"
    if item is not None and parts_named(item):
        return "list of parts"
    return readable(annotation)


def _default_of(kind: type, parameter: inspect.Parameter) -> str:
    if parameter.default is not parameter.empty:
        value = parameter.default
        if type(value).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
            field = next(f for f in dataclasses.fields(kind) if f.name == parameter.name)
            assert field.default_factory is not dataclasses.MISSING
            value = field.default_factory()
        return in_yaml(written_part(value))
    return "required"


def evidence_line(name: str) -> str:
    """A recipe's sources and what was seen of it, in one line."""
    evidence = evidence_of(RECIPES[name])
    seen = [] if evidence.gain is None else [f"gained {evidence.learned} here"]
    seen += ["ran on a GPU"] if evidence.on_gpu else []
    return f"Evidence: {'; '.join([SOURCE_KINDS[evidence.sources.kind], *seen])}."


def recipe_rows(name: str, parts: bool = False) -> list[RecipeRow]:
    """The settings of a recipe. `parts`: also those that every recipe has, such as the parts that
    it lets you replace."""
    parameters = function_parameters(recipe_function(name))
    fields = {k: f for k, f in recipe_kind(name).model_fields.items() if k != "name"}
    forms = {k: FORMS if k in RECIPE_PARTS else readable(f.annotation) for k, f in fields.items()}
    rows = [
        RecipeRow(k, readable(f.annotation), in_yaml(f.default), f.description or "")
        for k, f in fields.items()
        if k in parameters
    ]
    return rows + [
        RecipeRow(key, form, "null", fields[key].description or "")
        for key, form in forms.items()
        if parts and key not in parameters
    ]


def readable(kind: Any) -> str:
    """A type in words: "group, batch or null" for Literal["group", "batch"] | None."""
    parts = get_args(kind)
    if FILE_AND_NAME in parts:
        return FILE_AND_NAME
    if kind is type(None):
        return "null"
    if kind in (Reward, Judge):
        return kind.__name__.lower()
    if kind is Any:
        return "any value"
    if is_hub_name(kind):
        return "folder or hub name"
    if get_origin(kind) is Annotated:
        named = any(mark.path for mark in marks(kind))
        return "file or folder" if named else readable(parts[0])
    if get_origin(kind) in (Sequence, Mapping, dict):
        many = "list of" if get_origin(kind) is Sequence else "names to"
        return f"{many} {readable(parts[-1])}"
    if get_origin(kind) is tuple:
        parts_read = [readable(part) for part in parts if part is not Ellipsis]
        return f"list of {parts_read[0]}" if Ellipsis in parts else f"[{', '.join(parts_read)}]"
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
