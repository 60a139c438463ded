"""A run's folder as its page shows it: settings, metrics and records, as far as they exist."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic_core import PydanticUndefined

from flowrl.bounded_files import json_object, parsed_json
from flowrl.errors import UserError
from flowrl.media.statistics import PREFIXES
from flowrl.pages.plain_files import plain_bytes, plain_lines
from flowrl.pages.records import (
    AlarmRecord,
    EndRecord,
    EvaluationRecord,
    LaunchRecord,
    TreeRecord,
    read_alarms,
    read_end,
    read_evaluations,
    read_starts,
    read_trees,
)
from flowrl.paths import no_run_in
from flowrl.settings import RunSettings
from flowrl.settings.file.strict_yaml import read_yaml
from flowrl.settings.model.kinds import MODEL_KINDS
from flowrl.settings.sections.recipe import RECIPE_SETTINGS
from flowrl.settings.words.scores import is_trained

EXPORTED = ("adapter", "pipeline", "model")  # weights that a run leaves at its end
_METRICS = "metrics.jsonl"
_LARGEST = 1e100  # of a page's numbers: differences of larger ones overflow
LAST = 2**40  # iteration of a page: beyond it, curves have no room between two
MOST_METRIC_NUMBERS = 8_000_000  # of a record that is read: a hundred thousand lines of eighty
MetricLine = Mapping[str, float]
MOST_ANSWERS, MOST_ANSWER_BYTES = 5, 2**20
_PLAIN = TypeAdapter[Any](Any)


@dataclass(frozen=True)
class RunFolder:
    """Contents of a run's folder. A damaged line or record counts as missing.

    settings  of run.yaml
    chosen    settings that differ from the defaults
    metrics   lines of metrics.jsonl, from the base model on
    votes     what people said of its samples, in sentences
    """

    folder: Path
    settings: Mapping[str, Any]
    chosen: Mapping[str, Any]
    metrics: Sequence[MetricLine]
    evaluations: Sequence[EvaluationRecord] = field(default_factory=list[EvaluationRecord])
    trees: Sequence[TreeRecord] = field(default_factory=list[TreeRecord])
    starts: Sequence[LaunchRecord] = field(default_factory=list[LaunchRecord])
    alarms: Sequence[AlarmRecord] = field(default_factory=list[AlarmRecord])
    votes: Sequence[str] = field(default_factory=list[str])
    end: EndRecord | None = None  # of the last start, before the run's own end

    @classmethod
    def read(cls, folder: Path) -> "RunFolder":
        """Read a run's folder. UserError if it is not one, or run.yaml cannot be read."""
        file = folder / "run.yaml"
        if not file.is_file():
            raise UserError(no_run_in(folder))
        settings = read_yaml(file)
        if not isinstance(settings, Mapping):
            raise UserError(f"{file} does not contain settings of a run")
        return cls(
            folder=folder,
            settings=settings,
            chosen=chosen_settings(settings),
            metrics=list(_metrics(folder)),
            evaluations=read_evaluations(folder),
            trees=read_trees(folder),
            starts=read_starts(folder),
            alarms=read_alarms(folder),
            votes=list(_votes(folder)),
            end=read_end(folder),
        )

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def recipe(self) -> str:
        recipe = self.settings.get("recipe")
        return str(recipe.get("name", "")) if isinstance(recipe, Mapping) else str(recipe or "")

    @property
    def done(self) -> int:
        """Number of finished iterations."""
        return max((int(line["iteration"]) for line in self.metrics), default=0)

    @property
    def planned(self) -> int:
        train = self.settings.get("train")
        count = train.get("iterations", self.done) if isinstance(train, Mapping) else self.done
        return count if isinstance(count, int) else self.done

    @property
    def finished(self) -> bool:
        exported = any((self.folder / name).is_dir() for name in EXPORTED)
        ended = bool(self.metrics) and "ended" in self.metrics[-1]  # by train.until
        return exported and (ended or self.done >= self.planned)

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of all iterations, without evaluations."""
        return sum((y for _, y in self.column("seconds")), 0.0)

    @property
    def raised(self) -> float:
        """Number of alarms."""
        return sum((value for _, value in self.column("alarms")), 0.0)

    @cached_property
    def names(self) -> list[str]:
        """All metrics, in the order of their first appearance."""
        names = dict.fromkeys(name for line in self.metrics for name in line)
        return [name for name in names if name != "iteration"]

    def column(self, name: str) -> list[tuple[float, float]]:
        """(iteration, value) wherever the metric is a finite number."""
        return [(line["iteration"], line[name]) for line in self.metrics if name in line]

    @property
    def key(self) -> str:
        """The held-out reward that decides which weights are best; empty without held-out
        rewards."""
        checkpoint = self.settings.get("checkpoint")
        chosen = checkpoint.get("best") if isinstance(checkpoint, Mapping) else None
        names = self.judges
        return str(chosen) if chosen in names else names[0] if names else ""

    @property
    def judges(self) -> list[str]:
        """Names of the held-out rewards, without training rewards that are measured beside them."""
        return [name for name in self.held_out_scores if not is_trained(name)]

    @property
    def held_out_scores(self) -> list[str]:
        """Names of all rewards that evaluations measure, the judges first."""
        std = [name for name in self.names if name.startswith("held_out_std/")]
        names = [name.removeprefix("held_out_std/") for name in std]
        if not names:
            names = [n.removeprefix("held_out/") for n in self.names if n.startswith("held_out/")]
        scores = [name for name in names if not name.startswith(PREFIXES)]
        order = self.evaluations[-1].scores if self.evaluations else ()
        return sorted(scores, key=lambda name: list(order).index(name) if name in order else 99)

    @property
    def best(self) -> int | None:
        """Iteration with the highest held-out score; None without evaluations."""
        column = self.column(f"held_out/{self.key}")
        return int(max(column, key=lambda point: (point[1], -point[0]))[0]) if column else None


def _metrics(folder: Path) -> Iterator[MetricLine]:
    """Lines with their finite numbers. Unreadable lines, and a file that is no plain one, are left
    out. UserError for more numbers than a page can hold."""
    file, numbers = folder / _METRICS, 0
    with suppress(OSError):
        for text in plain_lines(folder, file):
            line = json_object(text) if b"iteration" in text else None
            if line is None or not isinstance(line.get("iteration"), int):
                continue
            values = {name: float(value) for name, value in line.items() if _finite(value)}
            if not 0 <= values.get("iteration", -1) <= LAST:
                continue
            numbers += len(values)
            if numbers > MOST_METRIC_NUMBERS:
                raise UserError(
                    f"{file} has more than {MOST_METRIC_NUMBERS} numbers, which no page can show: "
                    "move it away"
                )
            yield values


def _votes(folder: Path) -> Iterator[str]:
    """Sentences of the answers in `votes/`, the newest first. Unreadable ones are left out."""
    for path in sorted(folder.glob("votes/*/answer.json"), reverse=True)[:MOST_ANSWERS]:
        try:
            answer = parsed_json(plain_bytes(folder, path, MOST_ANSWER_BYTES))
        except (OSError, ValueError):
            continue
        lines = answer.get("sentences") if isinstance(answer, dict) else None
        if isinstance(lines, list):
            yield from (f"{path.parent.name}: {line}" for line in lines if isinstance(line, str))


def _finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and -_LARGEST <= value <= _LARGEST


def flat(tree: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Paths such as `train.lr` with their values; lists and empty mappings count as values."""
    for name, value in tree.items():
        path = f"{at}{name}"
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def chosen_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's settings that differs from the defaults or has no default, as a tree of
    plain data. A page may be made from an untrusted folder, so no file that it names is imported:
    all settings of a user's own recipe count as chosen."""
    defaults = _defaults(RunSettings)
    recipe = settings.get("recipe")
    name = recipe.get("name") if isinstance(recipe, Mapping) else None
    if isinstance(name, str) and name in RECIPE_SETTINGS:
        defaults["recipe"] = {**_defaults(RECIPE_SETTINGS[name]), "name": PydanticUndefined}
    # older files have null for the other kinds
    defaults["model"] = {kind.KIND: None for kind in MODEL_KINDS}
    for kind in MODEL_KINDS:
        defaults["model"] |= _defaults(kind)
    return _differing(settings, defaults)


def _defaults(kind: type[BaseModel]) -> dict[str, Any]:
    """Defaults by their names in a file; for a part without a default, the defaults of its
    fields."""
    values: dict[str, Any] = {}
    for name, setting in kind.model_fields.items():
        value = setting.get_default(call_default_factory=True, validated_data={})
        part = setting.annotation
        if value is not PydanticUndefined:
            values[setting.alias or name] = _PLAIN.dump_python(value, mode="json", by_alias=True)
        elif isinstance(part, type) and issubclass(part, BaseModel):
            values[setting.alias or name] = _defaults(part)
    return values


def _differing(chosen: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    differing: dict[str, Any] = {}
    for name, value in chosen.items():
        default = defaults.get(name, PydanticUndefined)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            if inner := _differing(value, default):
                differing[name] = inner
        elif value != default:
            differing[name] = value
    return differing
