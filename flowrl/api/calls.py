"""Arguments of calls that stand for commands: checked as the command line checks its words."""

import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from types import FrameType, UnionType
from typing import Any, ParamSpec, Protocol, TypeVar, Union, get_args, get_origin

import numpy as np
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypeAliasType

from flowrl.blame import blamed_in_words
from flowrl.cli.command_table import COMMANDS
from flowrl.errors import UserError, messages_name
from flowrl.settings.file.plain import texts_of_paths
from flowrl.settings.read import Overrides
from flowrl.settings.words.names import flowrl_words, unknown_name
from flowrl.settings.words.other_forms import other_form
from flowrl.settings.words.sentences import plain_message
from flowrl.settings.words.values import short_repr

T = TypeVar("T")
P = ParamSpec("P")
_COMMANDS = {  # commands with another name than their call
    "new_run": "new",
    "import_run": "import",
    "list_runs": "runs",
    "list_recipes": "recipes",
    "list_rewards": "rewards",
    "completion_script": "completion",
    "push": "export",
}
_COMMAND_LINE = re.compile(rf"\bflowrl (?:{'|'.join(map(re.escape, COMMANDS))})\b")
_OPTION = re.compile(r"(?<![^\s(])--([a-z][a-z-]*)(?=[\s:;,)]|$)")
_LISTS = (Sequence, Iterable)


def checked_arguments(
    kind: type[T], values: Mapping[str, Any], options: Mapping[str, Any], at: str
) -> T:
    """The arguments of a command; `options` take precedence over `values`. UserError for an unknown
    option or a value of another type."""
    fields = list(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    if unknown := [name for name in options if name not in fields]:
        raise UserError(f"{at}: options: {unknown_name(unknown[0], fields)}")
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
            [(f"{section}.{name}", entry) for name, entry in inner] if inner else [(section, value)]
        )
        words += [f"--{name}={_word(entry)}" for name, entry in pairs]
    return words


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(texts_of_paths(value))


def public_call(function: Callable[P, T]) -> Callable[P, T]:
    """A function of the Python API, which answers arguments that it does not have, and paths and
    lists that are none, with a UserError in place of a TypeError from within."""
    return _checked(function, f"flowrl.{function.__name__}", 0)


def public_calls(kind: type[T]) -> type[T]:
    """A class of the Python API, all of whose public methods are as `public_call` makes them."""
    functions = [getattr(member, "__func__", member) for member in vars(kind).values()]
    taken = {
        name
        for function in filter(inspect.isfunction, functions)
        for name in inspect.signature(function).parameters
    }
    for name, member in list(vars(kind).items()):
        at = f"flowrl.{kind.__name__}" + ("" if name == "__init__" else f".{name}")
        if isinstance(member, classmethod):
            setattr(kind, name, classmethod(_checked(member.__func__, at, 1, taken)))
        elif inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, _checked(member, at, 1, taken))
    return kind


def _checked(
    function: Callable[P, T], at: str, skipped: int, taken: Collection[str] = ()
) -> Callable[P, T]:
    """`skipped`: those that a caller does not write, such as self. `taken`: names of
    arguments of other calls of its class."""
    signature = inspect.signature(function)
    names = {*taken, *signature.parameters}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if _is_own(sys._getframe(1)):  # within another call, which messages name, or a command
            return checked(*args, **kwargs)
        with messages_name(at):
            try:
                with blamed_in_words():
                    return checked(*args, **kwargs)
            except UserError as error:
                if (said := _of_call(str(error), at, names)) == str(error):
                    raise
                error.args = (said,)
                raise

    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            raise UserError(f"{at}: {_misfit(signature, len(args), kwargs, skipped)}") from None
        for name, value in list(bound.items())[skipped:]:
            parameter = signature.parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            if wanted := _wanted(parameter.annotation, value):
                raise UserError(f"{at}: {name} must be {wanted}, not {short_repr(value)}")
            if odd := _odd_entry(parameter.annotation, value):
                raise UserError(f"{at}: {name}: {odd}")
        return function(*args, **kwargs)

    return call


def _is_own(frame: FrameType) -> bool:
    """Whether flowrl's own code runs in a frame."""
    return frame.f_globals.get("__name__", "").partition(".")[0] == "flowrl"


def _of_call(said: str, at: str, arguments: Collection[str]) -> str:
    """A message of code that a command and a call share, with the names of the call in place of the
    command's: `sample: --weights a` is `flowrl.Run.sample: weights a`. A command line within is
    left as it is."""
    last = at.rpartition(".")[2]
    command = _COMMANDS.get(last, last.replace("_", "-"))
    rest = said.removeprefix(f"{command}: ")
    named = rest != said or _OPTION.match(rest) is not None
    if not _COMMAND_LINE.search(rest):
        names = {name.replace("_", "-"): name for name in arguments}
        rest = _OPTION.sub(lambda match: names.get(match[1], match[0]), rest)
    return f"{at}: {rest.removeprefix('--')}" if named else rest


def _misfit(
    signature: inspect.Signature, count: int, named: Mapping[str, object], skipped: int
) -> str:
    """Why arguments do not fit a signature."""
    parameters = list(signature.parameters.values())[skipped:]
    names = [parameter.name for parameter in parameters]
    placed = [parameter for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    if unknown := [name for name in named if name not in names]:
        return f"there is no argument {unknown[0][:100]!r}; {_instead(unknown[0], names)}"
    if count - skipped > len(placed):
        by_name = [
            parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        ]
        few = [parameter.name for parameter in placed]
        only = f"only {' and '.join(few)} may" if few else "no argument may"
        lists = bool(placed) and any(kind in _LISTS for kind in _kinds(placed[-1].annotation))
        one = f" ({few[-1]} is one list)" if lists else ""
        rest = f"; name the others: {', '.join(by_name)}" if by_name else ""
        return f"{only} come without a name{one}{rest}"
    written = {parameter.name for parameter in placed[: count - skipped]}
    if twice := [name for name in named if name in written]:
        return f"{twice[0]} is given twice"
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    missing = [name for name in needed if name not in written and name not in named]
    return f"{' and '.join(missing)} must be given"


# settings whose argument has another name than the last word of the setting
_ARGUMENTS = {
    "prompts.train": "prompts",
    "model.pipeline": "model",
    "model.language": "model",
    "recipe.group": "count",
}
_OF_THE_HUB = {  # arguments of `push_to_hub` elsewhere, and the ones here
    "repo_id": "repository",
    "repo_name": "repository",
    "model_id": "repository",
    "hub_model_id": "repository",
    "hub_private_repo": "private",
    "hub_private": "private",
}
_TOKENS = ("token", "hub_token", "use_auth_token")


def _instead(name: str, names: Sequence[str]) -> str:
    """The advice for an argument that a call does not have: flowrl's word for another library's
    name, the nearest name, or all names."""
    if (argument := _OF_THE_HUB.get(name)) in names:
        return f"did you mean {argument!r}?"
    if "repository" in names and name in _TOKENS:
        return "the hub's token comes from `hf auth login` or the variable HF_TOKEN"
    written = list[str]()
    for setting in flowrl_words(name):
        section, *inner = setting.removeprefix("--").split(".")
        likely = (_ARGUMENTS.get(setting, ""), *reversed(inner or [section]))
        argument = next((word for word in likely if word in names), None)
        if argument is not None:
            written.append(repr(argument))
        elif "settings" in names:
            written.append(f"the setting {setting}")
    if written:
        return f"did you mean {' or '.join(dict.fromkeys(written))}?"
    if name not in names and (form := other_form(name)):
        return form
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names) or 'none'}"


def _kinds(annotation: Any) -> list[Any]:
    """The types that an annotation allows, without their parameters."""
    return [get_origin(member) or member for member in _members(annotation)]


def _members(annotation: Any) -> tuple[Any, ...]:
    if isinstance(annotation, TypeAliasType):
        return _members(annotation.__value__)
    if get_origin(annotation) not in (Union, UnionType):
        return (annotation,)
    return tuple(inner for member in get_args(annotation) for inner in _members(member))


def _wanted(annotation: Any, value: object) -> str:
    """The kind of value that an annotation wants; empty for one that fits, and for annotations of
    kinds that are not plain, which the call itself checks."""
    kinds = [kind for kind in _kinds(annotation) if kind is not type(None)]
    if {bool, str} <= set(kinds) <= {bool, str, Collection}:  # rights: a word, or names
        return "" if isinstance(value, bool | str | Collection) else "True, False or names"
    if kinds == [Mapping]:
        left = _may_be_none(annotation)  # whose call has an example
        return "" if left or isinstance(value, Mapping) else "a mapping"
    plain = all(kind in _LISTS or inspect.isclass(kind) for kind in kinds)
    if not plain or any(kind in _LEFT or Protocol in kind.__mro__ for kind in kinds):
        return ""
    if value is None and _may_be_none(annotation):
        return ""
    if any(_is_of(kind, value) for kind in kinds):
        return ""
    names = [_KIND_NAMES.get(kind, _with_article(kind)) for kind in kinds if kind is not str]
    if str in kinds and Path not in kinds:  # a path is a text too
        names.insert(0, "a text")
    names = list(dict.fromkeys(names))
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


def _may_be_none(annotation: Any) -> bool:
    return type(None) in _kinds(annotation)


def _is_of(kind: Any, value: object) -> bool:
    """Whether a value is of a plain kind. A text is a path, and no list; a number is no truth."""
    if kind in _LISTS:
        return isinstance(value, Iterable) and not isinstance(value, str | bytes)
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, Real):
            return False
        return kind is float or isinstance(value, Integral) or float(value).is_integer()
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if kind is Path:
        return isinstance(value, str | Path)
    return isinstance(value, kind) and not inspect.isclass(value)  # a class can be called too


def _with_article(kind: type[Any]) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"


_LEFT = (Any, Callable, Mapping)  # to the call, whose sentence has examples
_KIND_NAMES = {
    str: "a text",
    Path: "a path",
    Sequence: "a list",
    Iterable: "a list",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
}


def _odd_entry(annotation: Any, value: object) -> str:
    """The fault of an entry of a list; empty for a list whose entries fit. Only lists that can be
    read twice are looked at."""
    if not isinstance(value, list | tuple):
        return ""
    for member in _members(annotation):
        if get_origin(member) in _LISTS:
            (entry_kind,) = get_args(member)
            for number, entry in enumerate(value, 1):
                if wanted := _wanted(entry_kind, entry):
                    return f"entry {number} must be {wanted}, not {short_repr(entry)}"
    return ""
