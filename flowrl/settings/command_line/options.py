"""Command-line options that override a run's settings: `--train.lr 1e-4`, `--model.lora.rank 8`.

Every key of a run's file is an option. Values are parsed by the key's type: texts unchanged, lists
as words (`--recipe.at 0 3`), with commas (`0,3`) or as YAML (`'[0, 3]'`), mappings as YAML.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from flowrl.errors import UserError
from flowrl.settings.base import WITHOUT_COMMAS
from flowrl.settings.file.exclusive import taken_over
from flowrl.settings.file.older_names import older_option
from flowrl.settings.file.strict_yaml import list_entries, parse_yaml
from flowrl.settings.sections.data import RewardSpec
from flowrl.settings.sections.run import RunSettings
from flowrl.settings.words.names import suggestion
from flowrl.settings.words.sentences import fields_of, kinds_at, other_recipes, settings_at
from flowrl.settings.words.short_forms import spelled_out

_LISTS = (tuple, list, dict)
SHORT = ("model", "prompts")  # sections that a name or a file may stand for
_NULLS = ("null", "None")


@dataclass(frozen=True)
class Option:
    """A key of the settings: its path as in a file, and the type of its value."""

    path: tuple[str, ...]
    annotation: Any

    @property
    def kinds(self) -> list[Any]:
        """Types that a value may have, without their bounds."""
        return list(_kinds(self.annotation))

    def again(self, before: Sequence[str], words: Sequence[str], name: str) -> list[str]:
        """The words of a list that is given twice. UserError for anything else."""
        if tuple in self.kinds or list in self.kinds:
            return [*before, *words]
        values = " and ".join(" ".join(part)[:100] or "no value" for part in (before, words))
        raise UserError(f"--{name[:100]} is given twice, with {values}: keep one")

    def value(self, words: Sequence[str], name: str) -> Any:
        """Parse the words of an option into its value."""
        kinds = self.kinds
        if not words:
            if bool in kinds:
                return True
            raise UserError(f"{name} needs a value")
        whole = any(kind in _LISTS or settings_at(kind) for kind in kinds)
        if len(words) > 1 and not whole:
            raise UserError(f"{name} takes one value, not {' '.join(words)[:200]}")
        nullable = any(kind in (NoneType, Any) or settings_at(kind) for kind in kinds)
        if len(words) == 1 and words[0] in _NULLS and nullable:
            return None
        if settings_at(self.annotation) is RewardSpec and tuple in kinds:
            return list_entries(words, name)
        if not whole and Any not in kinds:
            return words[0]
        return _whole(split_by_commas(words, self.annotation), name, kinds)


def split_by_commas(words: Sequence[str], annotation: Any) -> list[str]:
    """Parse `0,3` like `0 3` in lists of numbers or fixed names; texts and files may contain
    commas."""
    if _free(annotation):
        return list(words)
    split = ([word] if word[:1] in "[{" else word.split(",") for word in words)
    return [part.strip() for parts in split for part in parts]


def _free(annotation: Any) -> bool:
    """Whether an annotation takes a free text or mapping, such as a file's name."""
    if get_origin(annotation) is Literal or WITHOUT_COMMAS in get_args(annotation):
        return False
    inner = get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]
    return any(map(_free, inner)) if inner else annotation not in (int, float, NoneType, ...)


def _whole(words: Sequence[str], name: str, kinds: Sequence[Any]) -> Any:
    """Parse a list or a mapping; a single word becomes a list of one if only a list is possible."""
    values = [parse_yaml(w, name) if Any in kinds or w[:1] in "[{" else w for w in words]
    many = any(kind in (tuple, list) for kind in kinds)
    alone = any(kind in (int, float, str, Any) for kind in kinds)
    if len(values) == 1 and (alone or not many or isinstance(values[0], list)):
        return values[0]
    return values


def with_options(
    tree: Mapping[str, Any], recipe: type[BaseModel], words: Sequence[str]
) -> dict[str, Any]:
    """A run's settings with the options over them, which take the place of settings that they
    exclude. UserError, with a suggestion, for an unknown option, and for one that is given twice,
    unless it is a list, which takes the words of both."""
    before: dict[tuple[str, ...], list[str]] = {}
    values: dict[tuple[str, ...], Any] = {}
    for name, entry in _options(words):
        option = _at((RunSettings,), (), _parts(name), recipe)
        if option is None and older_option(_parts(name), recipe.__name__):
            option = Option(tuple(_parts(name)), Any)
        if option is None:
            names = list(option_names(recipe))
            hint = other_recipes(_parts(name), recipe) or suggestion(
                name, names, "--", recipe=recipe.model_fields
            )
            if hint.startswith("one of"):
                hint = "`flowrl train --help` lists every setting"
            raise UserError(f"--{name[:100]} is not known; {hint}")
        if option.path in before:
            entry = option.again(before[option.path], entry, name)
        before[option.path] = entry
        negated = _parts(name)[-1].startswith("no_") and bool in option.kinds and not entry
        value = False if negated else option.value(entry, f"--{name}")
        section = option.path[-1]
        if option.path == (section,) and isinstance(value, str | list) and section in SHORT:
            value = spelled_out({section: value}, tree.get("recipe"))[section]
            values |= {(section, key): setting for key, setting in value.items()}
        else:
            values[option.path] = value
    layer: dict[str, Any] = {}
    for path, value in values.items():
        _put(layer, path, value)
    result = deepcopy(taken_over(tree, layer))
    for path, value in values.items():
        _put(result, path, value)
    return result


def _put(tree: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *parents, last = path
    for part in parents:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[last] = value


def _options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Names without dashes, each with the words up to the next option."""
    name, values = None, list[str]()
    for word in words:
        if word.startswith("--"):
            if name is not None:
                yield name, values
            name, equals, value = word.removeprefix("--").partition("=")
            values = [value] if equals else []
        elif name is None:
            raise UserError(f"{word[:100]!r} is not an option; write --SECTION.SETTING VALUE")
        else:
            values.append(word)
    if name is not None:
        yield name, values


def _parts(name: str) -> list[str]:
    return name.replace("-", "_").split(".")


def _at(
    section: Sequence[type[BaseModel]],
    path: tuple[str, ...],
    rest: Sequence[str],
    recipe: type[BaseModel],
) -> Option | None:
    """Find the key of a section, in any of its kinds, for the rest of an option's name, or None."""
    first, *more = rest
    for key, field in fields_of(section).items():
        written = field.alias or key
        no = first == f"no_{written}" and not more
        if first not in (key, written) and not no:
            continue
        place = (*path, written)
        inner = (recipe,) if place == ("recipe",) else kinds_at(field.annotation)
        if not more:
            return Option(place, dict if inner == (recipe,) else field.annotation)
        if inner and tuple not in list(_kinds(field.annotation)):
            return _at(inner, place, more, recipe)
        if dict in _kinds(field.annotation):
            return Option((*place, *more), Any)
        return None
    return None


def option_names(recipe: type[BaseModel]) -> Iterator[str]:
    """Paths of all settings, as written in options."""
    yield from _names_below((RunSettings,), "", recipe)


def _names_below(
    section: Sequence[type[BaseModel]], at: str, recipe: type[BaseModel]
) -> Iterator[str]:
    for key, field in fields_of(section).items():
        name = at + (field.alias or key)
        inner = (recipe,) if name == "recipe" else kinds_at(field.annotation)
        kinds = list(_kinds(field.annotation))
        below = bool(inner) and tuple not in kinds
        if below:
            yield from _names_below(inner, f"{name}.", recipe)
        if not below or int in kinds:  # one number may stand for the section
            yield name


def _kinds(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in _LISTS:
        yield origin
    elif origin is Literal:
        yield from {type(value) for value in get_args(annotation)}
    elif get_args(annotation):
        for part in get_args(annotation):
            yield from _kinds(part)
    else:
        yield annotation
