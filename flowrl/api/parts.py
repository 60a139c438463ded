"""Convert rewards and prompts passed from Python to settings of a run file."""

import functools
import inspect
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import IOBase
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps
from typing_extensions import TypeAliasType

from flowrl.errors import UserError, made_call
from flowrl.prompts import IMAGE_COLUMNS
from flowrl.prompts.conversations import with_prompts_found
from flowrl.prompts.source import PromptRows, has_cell, likely_column
from flowrl.session.live import Callback
from flowrl.settings.file.plain import texts_of_paths
from flowrl.settings.model.pipeline import GuidanceScale
from flowrl.settings.read import Overrides
from flowrl.settings.sections.data import IN_PYTHON, DataSet, RewardSpec
from rewards import Reward, Samples, load
from rewards.checks.settings import check_names
from rewards.perception.media import to_rgb
from rewards.user_function import (
    Own,
    function_settings,
    object_reward,
    said_words,
    user_reward,
)

_GRAY_16 = ("I", "I;16")  # PIL's modes of a PNG with 16 bits
_WITH_SETTINGS = "{'name': function, 'weight': 1.0}, and its settings beside them"
_RELABEL = "give one another label: {'name': object, 'label': 'another'}"
# aliases with names, so that `help` shows the names
GivenReward = TypeAliasType("GivenReward", str | Path | Mapping[str, Any] | Callable[..., Any])
SomeRewards = TypeAliasType("SomeRewards", GivenReward | Sequence[GivenReward])  # one, or a list


@dataclass(frozen=True)
class PromptSources:
    """Data sets of prompts, each by its file, its hub name, or YAML with its keys."""

    words: tuple[str, ...]


GivenPrompts = TypeAliasType(
    "GivenPrompts", str | Path | Mapping[str, Any] | Iterable[str | Mapping[str, Any]]
)
# names for help(), in which their unions would fill several lines
GivenCallbacks = TypeAliasType("GivenCallbacks", Sequence[Callback] | Callback)  # one, or a list
GivenGuidance = TypeAliasType("GivenGuidance", GuidanceScale)  # a number, "none" or None
GivenOverrides = TypeAliasType("GivenOverrides", Overrides)  # a mapping, or a command line's words


@dataclass(frozen=True)
class GivenRewards:
    """Rewards as settings, and rewards that are Python objects by label."""

    specs: tuple[dict[str, Any], ...]
    objects: Mapping[str, Reward]

    @classmethod
    def of(cls, rewards: Any, place: str) -> "GivenRewards":
        """Read names, settings and callables. `{name: a callable, weight: 0.5}` is allowed too.

        UserErrors begin with `place`.
        """
        if isinstance(rewards, Mapping) and "name" not in rewards:  # as `rewards: {pickscore: 1.0}`
            if callables := [key for key, value in rewards.items() if callable(value)]:
                raise UserError(
                    f"{place}: {callables[0]!r:.100} has a function where a weight stands; write "
                    f"{_WITH_SETTINGS}"
                )
            rewards = [{"name": name, "weight": weight} for name, weight in rewards.items()]
        elif isinstance(rewards, str | Path | Mapping) or callable(rewards):
            rewards = [rewards]
        if not isinstance(rewards, Iterable):
            raise UserError(
                f"{place}: give a list of rewards, each a name, a mapping with a `name`, or a "
                f"callable, not {type(rewards).__name__}"
            )
        specs, objects = [], dict[str, Reward]()
        for one in rewards:
            if isinstance(one, Mapping) and "name" not in one:
                raise UserError(
                    f"{place}: a mapping of {', '.join(map(repr, one)) or 'nothing'} has no "
                    f"`name`: write {_WITH_SETTINGS}"
                )
            spec = texts_of_paths(one if isinstance(one, Mapping) else {"name": one})
            named = spec.get("name")
            if callable(named):
                spec["label"] = spec.get("label") or _label(named)
                settings = {k: v for k, v in spec.items() if k not in ("name", "label", "weight")}
                reward = _reward(named, settings, place)
                spec["name"] = file_name(named) or IN_PYTHON + spec["label"]
            elif isinstance(named, str):
                if "," in named and ".py" not in named:
                    listed = [name.strip() for name in named.split(",") if name.strip()]
                    raise UserError(
                        f"{place}: {named!r:.100} is several names in one: write a list, {listed}"
                    )
                spec = {key: _in_file(value) for key, value in spec.items()}
                spec, reward = _with_objects(spec, place) if _has_object(spec) else (spec, None)
            elif isinstance(one, Mapping):
                raise UserError(
                    f"{place}: the `name` of a reward must be a text or a callable, not "
                    f"{named!r:.50}"
                )
            else:
                raise UserError(
                    f"{place}: a reward must be a name, a mapping with a `name`, or a callable, "
                    f"not {type(one).__name__}"
                )
            if reward is not None:
                if spec["label"] in objects:
                    raise UserError(
                        f"{place}: two objects have the label {spec['label']!r}; {_RELABEL}"
                    )
                objects[spec["label"]] = reward
            specs.append(spec)
        _check_labels(specs, objects, place)
        return cls(tuple(specs), objects)

    def joined(self, objects: Mapping[str, Reward], place: str) -> dict[str, Reward]:
        """Both collections of objects. UserError if two objects have the same label."""
        for label in self.objects.keys() & objects.keys():
            if not _same(self.objects[label], objects[label]):
                raise UserError(
                    f"{place}: rewards has another object labelled {label!r}; {_RELABEL}"
                )
        return {**objects, **self.objects}


def _check_labels(
    specs: Iterable[Mapping[str, Any]], objects: Mapping[str, Reward], place: str
) -> None:
    """UserError for a label of an object that a named reward has too: the label finds the object
    of a specification, and the named reward would be left out."""
    counts = Counter(spec["label"] for spec in specs if isinstance(spec.get("label"), str))
    if shared := [label for label in objects if counts[label] > 1]:
        raise UserError(
            f"{place}: an object and a named reward have the label {shared[0]!r}; {_RELABEL}"
        )


def _same(one: Reward, other: Reward) -> bool:
    """Whether both are one object, or one function with the same settings."""
    return one is other or (isinstance(one, Own) and isinstance(other, Own) and one == other)


def _in_file(value: Any) -> Any:
    """A setting with functions replaced by FILE.py:FUNCTION if they can be found there."""
    if isinstance(value, Mapping):
        return {key: _in_file(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_file(item) for item in value]
    return (file_name(value) or value) if callable(value) else value


def _has_object(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_object(item) for item in value.values())
    if isinstance(value, list):
        return any(_has_object(item) for item in value)
    return callable(value)


def _with_objects(spec: Mapping[str, Any], place: str) -> tuple[dict[str, Any], Reward]:
    """A reward composed of objects, such as a judge: in the form of run.yaml, and loaded."""
    checked = RewardSpec.model_validate(spec)
    try:
        reward = load(checked.name, **checked.settings)
    except (ValueError, ImportError) as error:
        raise UserError(f"{place}: {error}") from error
    weight = {"weight": spec["weight"]} if "weight" in spec else {}
    return {"name": IN_PYTHON + checked.label, "label": checked.label, **weight}, reward


def _label(reward: Any) -> str:
    inner = reward.func if isinstance(reward, functools.partial) else reward
    is_function = inspect.isroutine(inner) or inspect.isclass(inner)
    return str(inner.__name__ if is_function else type(inner).__name__).strip("<>")  # of <lambda>


class _NamedPartial(functools.partial[Any]):
    """A partial with a name. Two of the same partial are equal, so that it may be a reward of
    training and of evaluations."""

    @classmethod
    def of(cls, original: functools.partial[Any]) -> "_NamedPartial":
        named = cls(original.func, *original.args, **original.keywords)
        words = said_words(original.func) | said_words(original)
        vars(named).update(words, __name__=_label(original), original=original)
        return named

    def __eq__(self, other: object) -> bool:
        same_kind = isinstance(other, _NamedPartial)
        return same_kind and vars(self)["original"] is vars(other)["original"]

    def __hash__(self) -> int:
        return id(vars(self)["original"])


def _reward(reward: Callable[..., Any], settings: Mapping[str, Any], place: str) -> Reward:
    """A callable as a reward: a function by its signature, other objects unchanged."""
    if inspect.isclass(reward):
        raise UserError(f"{place}: {reward.__name__} is a class; pass an instance of it")
    function = reward.func if isinstance(reward, functools.partial) else reward
    if isinstance(reward, functools.partial):  # messages need its name
        reward = _NamedPartial.of(reward)
    if not inspect.isroutine(function):
        if settings:
            raise UserError(
                f"{place}: {_label(reward)} is an object, which takes no settings "
                f"({', '.join(settings)}): pass them to its constructor"
            )
        try:
            return object_reward(reward, _label(reward))
        except ValueError as error:
            raise UserError(f"{place}: {error}") from error
    try:
        check_names(_label(reward), function_settings(_label(reward), reward), settings)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from error
    return user_reward(reward, settings, _examples(function))


def _examples(function: Any) -> Callable[[], Samples] | None:
    """The function's attribute `examples`, or the function of that name in its module."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    return getattr(function, "examples", None) or (vars(module).get("examples") if module else None)


def file_name(reward: Callable[..., Any]) -> str | None:
    """The name FILE.py:FUNCTION under which another process can find a function.

    None for lambdas, methods, partials, functions of a notebook or of the script itself, and
    functions of a package, whose files cannot be imported alone.
    """
    return place_of(reward) if inspect.isfunction(reward) else None


def place_of(named: Any) -> str | None:
    """FILE.py:NAME of a function or class; None if another process could not find it."""
    if named.__module__ in ("__main__", None):
        return None
    module = sys.modules.get(named.__module__)
    if module is None or vars(module).get(named.__name__) is not named or module.__package__:
        return None
    path = getattr(module, "__file__", None) or ""
    return f"{Path(path).absolute()}:{named.__name__}" if path.endswith(".py") else None


def prompt_settings(prompts: Any, files: Path, place: str, column: str) -> Any:
    """Settings of a data set for prompts. Files, hub names, mappings with `source` and lists of
    these mappings stay as they are; texts and rows are written to a new file in `files`, with the
    rows' images next to it.

    UserError, with the row, for values that cannot be stored in a file.
    """
    at = f"{made_call()}: prompts ({place})"
    if isinstance(prompts, str | Path):
        return str(prompts)
    if isinstance(prompts, Mapping):
        if "source" not in prompts:
            raise UserError(
                f"{at}: a mapping must be a data set {{'source': ...}}; pass one split of a "
                "DatasetDict"
            )
        return texts_of_paths(prompts)
    prompts = _records(prompts)
    if isinstance(prompts, list | tuple) and any(_is_data_set(row, column) for row in prompts):
        if not all(_is_data_set(row, column) for row in prompts):
            raise UserError(
                f"{at}: a list has texts, rows or data sets {{'source': ...}}, not several of "
                "these: give each file as {'source': FILE}"
            )
        return texts_of_paths(prompts)
    if not isinstance(prompts, Iterable) or isinstance(prompts, IOBase):
        raise UserError(
            f"{at}: expected a file's name, texts, rows or a data set, not {type(prompts).__name__}"
        )
    path = files / f"{place}.jsonl"
    lines, lacking = list[str](), dict[int, Mapping[str, Any]]()
    for number, row in enumerate(prompts, 1):
        cells = _cells(row, number, path, column, at)
        lines.append(_line(cells, number, at))
        if not has_cell(cells, column):
            lacking[number] = cells
    if not lines:
        raise UserError(f"{at}: the list is empty")
    if lacking and not (len(lacking) == len(lines) and _other_form(lacking, column, at)):
        whole = place == "train" and len(lacking) == len(lines)
        raise UserError(f"{at}: {_without_prompt(lacking, column, of_all=whole)}")
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def without_files(said: str, files: Path) -> str:
    """A message without the place of files that `prompt_settings` has written into `files`, which
    the user never saw: a line of a list's file is a row of the list."""
    written = re.compile(
        r"(?:prompts\.(?:train|held_out): |--prompts: )?"
        rf"{re.escape(str(files))}/(train|held_out)\.jsonl(?:, line (\d+))?"
    )

    def row(match: re.Match[str]) -> str:
        at = f"{made_call()}: prompts ({match[1]})"
        return at if match[2] is None else f"{at}: row {match[2]}"

    return written.sub(row, said).replace(f"{files}/", "")


@contextmanager
def list_rows_named(files: Path) -> Iterator[None]:
    """Errors of the body are `without_files`. Each stays of its class, which decides exit codes."""
    try:
        yield
    except UserError as error:
        if (said := without_files(str(error), files)) != str(error):
            error.args = (said,)
        raise


def _is_data_set(value: Any, column: str) -> bool:
    """Whether an entry of a list is a data set with its settings rather than a row."""
    if not isinstance(value, Mapping) or "source" not in value or column in value:
        return False
    return set(value) <= set(DataSet.model_fields)


def _records(prompts: Any) -> Any:
    """The rows of a pandas table, which iterates over the names of its columns; other values
    unchanged."""
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(prompts, pandas.DataFrame):
        return prompts
    return prompts.astype(object).where(prompts.notna(), None).to_dict("records")


def _other_form(rows: Mapping[int, Mapping[str, Any]], column: str, at: str) -> bool:
    """Whether rows without the prompts' column hold it in another form, such as conversations."""
    if column != "prompt":
        return False
    table = PromptRows([dict(row) for row in rows.values()], [f"row {number}" for number in rows])
    with warnings.catch_warnings():  # of rows that are left out: the reader of the file says it
        warnings.simplefilter("ignore")
        return all(column in row for row in with_prompts_found(table, at).rows)


def _without_prompt(rows: Mapping[int, Mapping[str, Any]], column: str, of_all: bool) -> str:
    """The clause about rows without the prompts' column. A list has no settings of its own, so the
    remedy is its key, or, if another column may be that of all prompts, `of_all`, the run's."""
    number, row = next(iter(rows.items()))
    names = ", ".join(str(name)[:50] for name in row) or "no columns"
    likely = likely_column(dict(row), column)
    way = f"call the key of the prompt {column!r}"
    if likely is not None and of_all:
        way += f", or pass settings={{'prompts': {{'column': {likely!r}}}}}"
    return f"row {number} has no {column!r}; it has {names}: {way}"


def _cells(row: Any, number: int, path: Path, column: str, at: str) -> Mapping[str, Any]:
    """The columns of a row, with its images saved next to the prompt file."""
    if not isinstance(row, str | Mapping):
        raise UserError(
            f"{at}: row {number} is a {type(row).__name__}, not a text or a mapping of columns"
        )
    cells = {column: row} if isinstance(row, str) else dict(row)
    for name, value in cells.items():
        if isinstance(value, Image.Image):
            cells[name] = _saved_image(value, name, number, path, at)
    return cells


def _line(cells: Mapping[str, Any], number: int, at: str) -> str:
    try:
        return json.dumps(texts_of_paths(cells))
    except (TypeError, ValueError) as error:
        raise UserError(f"{at}: row {number} cannot be written to a file: {error}") from error


def _saved_image(image: Image.Image, name: str, number: int, path: Path, at: str) -> str:
    """Save an image next to the prompt file; returns its path relative to the file."""
    if not IMAGE_COLUMNS.fullmatch(name):
        raise UserError(
            f"{at}: row {number} has an image in {name!r}; call the column `image`, or by another "
            "image argument of the pipeline"
        )
    folder = path.with_name(f"{path.stem}_images")
    folder.mkdir(exist_ok=True)
    try:  # as files are read
        saved = ImageOps.exif_transpose(image) if image.mode in _GRAY_16 else to_rgb(image)
    except ValueError as error:
        raise UserError(f"{at}: row {number}, {name}: {error}") from error
    saved.save(folder / f"{number:06d}_{name}.png")
    return f"{folder.name}/{number:06d}_{name}.png"
