"""Pydantic's errors as sentences: the place, the given value, and valid values."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from flowrl.recipes import RECIPES
from flowrl.settings.words.names import BASE_KEY, flowrl_words, unknown_name
from flowrl.settings.words.short_forms import model_named
from flowrl.settings.words.values import short_repr

_MOST_SENTENCES = 5
_FORM = re.compile(
    r"(constrained-)?(float|int|str)|bool|(tuple|list|dict|literal|function-[a-z]+)\[.*\]"
)  # of a value of several types
_SIZES = {"too_short": ("at least", "min_length"), "too_long": ("at most", "max_length")}
_EITHER = "model.pipeline or model.language?"
_BASE = (f"did you mean {BASE_KEY!r}?", f"did you mean {BASE_KEY}?")


def explain(
    error: ValidationError,
    whole: type[BaseModel] | None = None,
    recipe: type[BaseModel] | None = None,
) -> str:
    """One clause per mistake, as `in_one` joins them. The arguments are those of `clauses_of`."""
    return in_one(clauses_of(error, whole, recipe))


def in_one(clauses: Sequence[str]) -> str:
    """Clauses, separated by semicolons; at most _MOST_SENTENCES of them."""
    more = len(clauses) - _MOST_SENTENCES
    return "; ".join(clauses[:_MOST_SENTENCES]) + (f"; and {more} more" if more > 0 else "")


def clauses_of(
    error: ValidationError,
    whole: type[BaseModel] | None = None,
    recipe: type[BaseModel] | None = None,
) -> list[str]:
    """One clause per mistake.

    `whole` is the settings model that was read, whose names are suggested for unknown ones. For a
    run, `recipe` holds the settings of its recipe, if that is known.
    """
    errors = _causes(error.errors(include_url=False))
    clauses = list(dict.fromkeys(_clause(error, whole, recipe) for error in errors))
    misspelt = [clause for clause in clauses if clause.endswith(_BASE)]
    return misspelt or clauses  # the sections that seem to be missing are the base's


def _causes(errors: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Errors without those that follow from others, and with the places that a file has.

    pydantic adds an error for a list that its refused entries leave empty, and one for each form
    that a value might have had, such as `weight.float` and `weight.tuple[...]`: of these, the ones
    in which the value has the form and something else is wrong are kept, else the first.
    """
    forms: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for error in errors:
        at = error["loc"]
        extra = at[-1:] if error["type"] == "extra_forbidden" else ()  # a key of the file's
        first = next((i for i, part in enumerate(at) if _is_form(part)), len(at) - len(extra))
        inner = (part for part in at[: len(at) - len(extra)] if not _is_form(part))
        plain = {**error, "loc": (*inner, *extra)}
        forms.setdefault(at[:first] if first < len(at) - len(extra) else (*at, None), []).append(
            plain
        )
    causes: list[dict[str, Any]] = []
    for errors_of_form in forms.values():
        causes += [
            e for e in errors_of_form if not str(e["type"]).endswith("_type")
        ] or errors_of_form[:1]
    return [e for e in causes if e["type"] != "too_short" or not _holds_another(e, causes)]


def _is_form(part: Any) -> bool:
    return isinstance(part, str) and _FORM.fullmatch(part) is not None


def _holds_another(error: Mapping[str, Any], errors: Sequence[Mapping[str, Any]]) -> bool:
    at = error["loc"]
    return any(other is not error and other["loc"][: len(at)] == at for other in errors)


def _clause(
    e: Mapping[str, Any], whole: type[BaseModel] | None, recipe: type[BaseModel] | None
) -> str:
    where = [str(part)[:100] for part in e["loc"]]
    at = ".".join(_in_one_line(part) for part in where)
    if e["type"] == "extra_forbidden":
        if recipes_with_it := other_recipes(where, recipe):
            return f"{at}: {short_repr(where[-1])} is not known; {recipes_with_it}"
        elsewhere = _sections_with(where[-1], whole, recipe)
        names = _names(where[:-1], whole, recipe)
        sentence = unknown_name(where[-1], names, elsewhere, _recipe_names(recipe))
        published = recipe is not None and recipe.__name__ in RECIPES
        if sentence.endswith(_EITHER) and isinstance(e["input"], str) and recipe and published:
            (kind,) = model_named(e["input"], recipe.__name__)
            sentence = sentence.removesuffix(_EITHER) + f"model.{kind}?"
        return f"{at}: {sentence}"
    if e["type"] == "missing":
        return f"{at}: missing"
    if e["type"] in ("model_type", "model_attributes_type"):
        names = ", ".join(_names(where, whole, recipe)[:3])
        return f"{at}: expected settings ({names}, ...), not {short_repr(e['input'])}"
    if e["type"] == "value_error":
        message = e.get("ctx", {}).get("error")
        return f"{at}: {message}" if at else str(message)
    return f"{at}: {plain_message(e)}"


def _in_one_line(key: str) -> str:
    """The key, or its repr if it contains line breaks or invisible characters."""
    return key if key.isprintable() and key.strip() else repr(key)


_LISTS = ("tuple_type", "list_type")
_CONTAINERS = dict.fromkeys(_LISTS, "a list") | dict.fromkeys(
    ("dict_type", "mapping_type"), "a mapping"
)


def plain_message(e: Mapping[str, Any]) -> str:
    """pydantic's message with the offending value, or our own."""
    if e["type"] == "value_error":  # of our own, which says all
        return str(e.get("ctx", {}).get("error", e["msg"]))
    message = e["msg"][0].lower() + e["msg"][1:]
    if e["type"] in _CONTAINERS:  # whose words in Python no file has
        message = f"expected {_CONTAINERS[e['type']]}"
    if e["type"] in _LISTS and isinstance(e["input"], str | int | float):
        message = f"{message}, such as [{short_repr(e['input'])}]"
    if e["type"] in _SIZES:
        words, bound = _SIZES[e["type"]]
        count = e["ctx"][bound]
        message = f"expected {words} {count} value{'s' if count != 1 else ''}"
    return f"{message}, not {short_repr(e['input'])}"


def _recipe_names(recipe: type[BaseModel] | None) -> list[str] | None:
    return None if recipe is None else list(recipe.model_fields)


def _names(
    where: Sequence[str], whole: type[BaseModel] | None, recipe: type[BaseModel] | None
) -> list[str]:
    """The keys of the settings at a place."""
    if whole is None:
        return []
    kinds: Sequence[type[BaseModel]] = (whole,)
    for part in where:
        if part == "recipe":
            kinds = (recipe or whole,)
        elif part in (fields := fields_of(kinds)):  # not a number, or a key that a user chose
            kinds = kinds_at(fields[part].annotation) or (whole,)
    names = [field.alias or name for name, field in fields_of(kinds).items()]
    based = not where and "recipe" in whole.model_fields  # a run's file alone can have a base
    return [*names, BASE_KEY] if based else names


def _sections_with(
    name: str, whole: type[BaseModel] | None, recipe: type[BaseModel] | None
) -> list[str]:
    """Settings of this name in a section of the whole, as `section.name`."""
    sections = []
    for part, field in whole.model_fields.items() if whole is not None else ():
        listed = get_origin(field.annotation) is tuple
        kind = recipe if part == "recipe" else settings_at(field.annotation)
        if kind is not None and not listed and name in _names([part], whole, recipe):
            sections.append(f"{part}.{name}")
    return sections


def other_recipes(path: Sequence[str], recipe: type[BaseModel] | None) -> str | None:
    """The recipes of the same kind that have a setting which this one lacks, as a clause.

    None if there are none, or if another library has this name for a setting of the recipe.
    """
    name = "" if recipe is None else recipe.__name__
    if name not in RECIPES or len(path) != 2 or path[0] != "recipe":
        return None
    if set(flowrl_words(path[1])) - {f"recipe.{path[1]}"}:
        return None
    alike = [
        recipe_name
        for recipe_name in RECIPES
        if recipe_name.startswith("text") == name.startswith("text")
    ]
    having = [
        recipe_name
        for recipe_name in alike
        if path[1] in inspect.signature(RECIPES[recipe_name]).parameters
    ]
    more = f" and {len(having) - 4} more" if len(having) > 4 else ""
    return f"{name} has no such setting, {', '.join(having[:4])}{more} do" if having else None


def settings_at(annotation: Any) -> type[BaseModel] | None:
    """Settings model in an annotation such as `Lora | None` or `tuple[RewardSpec, ...]`; the first
    of several kinds."""
    return next(iter(kinds_at(annotation)), None)


def kinds_at(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Settings models in an annotation: of a section, or several kinds of it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    inner = [kind for argument in get_args(annotation) for kind in kinds_at(argument)]
    return tuple(dict.fromkeys(inner))


def fields_of(kinds: Sequence[type[BaseModel]]) -> dict[str, FieldInfo]:
    """The settings of a section, by their names in Python. Of several kinds: first those that name
    a kind, then all others; a name that several kinds have means the same in each."""
    fields = [item for kind in kinds for item in kind.model_fields.items()]
    naming = [item for item in fields if item[1].is_required()] if len(kinds) > 1 else []
    by_name: dict[str, FieldInfo] = {}
    for name, field in (*naming, *fields):
        by_name.setdefault(name, field)
    return by_name
