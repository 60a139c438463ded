"""Prompt files, and the rewards that score the samples."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    field_serializer,
    field_validator,
    model_validator,
)

from flowrl.errors import UserError
from flowrl.paths import find
from flowrl.prompts import DataSource, PromptSet, Selection, on_hub
from flowrl.prompts.source import GIVEN_FILE
from flowrl.settings.base import OnResume, Settings
from flowrl.settings.sections.given import OF_GIVEN
from flowrl.settings.words.values import short_repr
from rewards.rights import ReadSource, Right, allows

_BOUNDS = {"min", "max"}
IN_PYTHON = "python:"  # begins the name of a reward that no file can name
PromptPlace = Literal["train", "held_out"]


class DataSet(Settings):
    """A data set of prompts: a file, a folder or a hub data set, and a selection of rows."""

    source: ReadSource = Field(min_length=1)
    """A file (jsonl, json, csv, tsv, txt, parquet), a folder, or a hub name (owner/name)."""
    name: str = ""
    """Its name among several data sets, in the column `data_set`; by default the source."""
    config: str | None = None
    """Configuration of a hub data set."""
    split: str | None = None
    """Split of a hub data set or of a folder; null: train."""
    revision: str | None = None
    """Branch, tag or commit of a hub data set; null: the newest."""
    unpacked: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """GiB that a hub data set may take once unpacked; null: 1 GiB, and 32 times its files."""
    column: str | None = None
    """Column that holds the prompts: texts, or lists of chat messages; null: prompts.column."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Additional names for columns, such as {answer: reward_model.ground_truth}."""
    keep: tuple[str, ...] | None = None
    """Columns to keep, including the prompts' column; null: all. Saves memory."""
    where: dict[str, Any] = Field(default_factory=dict)
    """Rows to keep: a column and its value, a list of values, or {min: 0.1, max: 0.9}."""
    shuffle: int | None = Field(default=None, ge=0)
    """Seed of the rows' order before `limit`; null: the order of the file."""
    limit: int | None = Field(default=None, ge=1)
    """Most rows."""
    drop_reply: bool = False
    """Leave out an assistant's message at the end of a chat."""
    weight: float | None = Field(default=None, gt=0)
    """Share of each iteration's prompts, among several data sets; null for all: by their sizes."""

    @field_validator("where")
    @classmethod
    def _values(cls, where: dict[str, Any]) -> dict[str, Any]:
        for name, wanted in where.items():
            values = wanted if isinstance(wanted, list) else [wanted]
            if isinstance(wanted, Mapping):
                values = list(wanted.values()) if wanted and set(wanted) <= _BOUNDS else [wanted]
            if any(isinstance(value, Mapping | list) for value in values):
                raise ValueError(
                    f"{name}: expected a value, a list of values, or bounds such as {{min: 0.1, "
                    f"max: 0.9}}, not {short_repr(wanted)}"
                )
            for bound, value in wanted.items() if isinstance(wanted, Mapping) else ():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if value is not None and not number:
                    raise ValueError(f"{name}.{bound} must be a number, not {short_repr(value)}")
        return where

    @property
    def label(self) -> str:
        """Name of the data set in the column `data_set`: `name`, or `source` without one."""
        return self.name or self.source

    def read(self, column: str, place: str) -> PromptSet:
        """Read the data set. UserErrors begin with `place`."""
        return PromptSet.of(self.at(column), place)

    def at(self, column: str) -> DataSource:
        """The data set in the form that `flowrl.prompts` reads."""
        select = Selection(self.where, self.shuffle, self.limit, self.keep)
        return DataSource(
            source=self.source,
            column=self.column or column,
            config=self.config,
            split=self.split,
            revision=self.revision,
            selection=select,
            columns=self.columns,
            drop_reply=self.drop_reply,
            unpacked=self.unpacked,
        )


def _listed(value: Any) -> Any:
    """Convert a file's name, a data set or a list of both to a list of data sets."""
    if value is None or isinstance(value, tuple):
        return value
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(entry, str | Mapping | DataSet) for entry in values):
        raise ValueError(
            f"expected a file, or a data set such as {{source: openai/gsm8k, config: main}}, or a "
            f"list of these, not {short_repr(value)}"
        )
    if "" in values:
        raise ValueError("the file name is empty")
    return tuple({"source": entry} if isinstance(entry, str) else entry for entry in values)


def _as_written(sets: tuple[DataSet, ...] | None) -> Any:
    """Data sets as written in a run file: without settings, only their names."""
    written = [data_set.model_dump(mode="json", exclude_defaults=True) for data_set in sets or ()]
    short = [entry["source"] if len(entry) == 1 else entry for entry in written]
    return None if sets is None else short[0] if len(short) == 1 else short


DataSets = Annotated[
    tuple[DataSet, ...],
    BeforeValidator(_listed, json_schema_input_type=str | DataSet | list[str | DataSet]),
]


class PromptFiles(Settings):
    """Prompts for training and evaluation: each a file, a folder or a hub data set; a data set
    with settings, such as {source: openai/gsm8k, config: main, column: question}; or a list of
    these."""

    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {"unwinnable": OnResume.NEVER}
    train: DataSets
    held_out: DataSets | None = None
    per_iteration: int = Field(default=16, ge=1, le=1_000_000)
    """Prompts drawn per iteration; each gets a group of samples."""
    column: str = "prompt"
    """Column that holds the prompts."""
    unwinnable: Literal["refuse", "leave_out", "keep"] = "refuse"
    """Training rows that nothing can win (an empty answer, tests that their own reference fails).
    refuse: the start refuses and names them; leave_out: they are never drawn; keep: they are
    drawn."""

    @field_serializer("train", "held_out")
    def _written(self, sets: tuple[DataSet, ...] | None) -> Any:
        return _as_written(sets)

    @field_validator("train", "held_out")
    @classmethod
    def _several(cls, sets: tuple[DataSet, ...] | None) -> tuple[DataSet, ...] | None:
        labels = [data_set.label for data_set in sets or ()]
        if len(set(labels)) < len(labels):
            raise ValueError(f"{labels} are not unique; give each data set a `name`")
        weights = [data_set.weight for data_set in sets or ()]
        if any(weights) and not all(weights):
            raise ValueError("give either all of its data sets a weight, or none of them")
        return sets

    @property
    def given(self) -> tuple[PromptPlace, ...]:
        """Training prompts, and evaluation prompts if given."""
        return ("train",) if self.held_out is None else ("train", "held_out")

    def on_hub(self, place: PromptPlace) -> bool:
        """Whether any data set comes from the hub."""
        return any(on_hub(data_set.source) for data_set in getattr(self, place) or ())

    def on_disk(self, place: PromptPlace) -> bool:
        """Whether all data sets are existing files or folders that may be read."""
        return all(
            (path := find(data_set.source)).exists() and allows(Right.FILES, data_set.source, path)
            for data_set in getattr(self, place) or ()
        )

    def read(self, place: PromptPlace) -> PromptSet:
        """Read the prompts for training or evaluation. UserError, naming the place, if they cannot
        be read, or if an iteration of training has no prompt from a weighted data set."""
        sets, at = getattr(self, place) or (), f"prompts.{place}"
        if len(sets) == 1 and place == "train" and sets[0].name == OF_GIVEN:
            at = GIVEN_FILE  # which the user has set, and not prompts.train
        if len(sets) == 1:
            return sets[0].read(self.column, at)
        prompts = {data_set.label: data_set.read(self.column, at) for data_set in sets}
        weights = [data_set.weight for data_set in sets if data_set.weight is not None]
        joined = PromptSet.joined(prompts, weights)
        # an evaluation takes its prompts evenly from all held-out ones
        if place == "train" and weights and (none := joined.never_drawn(self.per_iteration)):
            raise UserError(
                f"{at}: {sets[none[0]].label} has weight {weights[none[0]]:g}, too small for a "
                f"single prompt per iteration of {self.per_iteration}: raise it, or "
                "prompts.per_iteration"
            )
        return joined


def _names(value: Any) -> Any:
    """Convert one name to a list of it."""
    return (value,) if isinstance(value, str) else value


def _refuse_setting(name: str, label: Any) -> None:
    """ValueError for a label of scores where the reward has a setting of that name, which may be
    meant. Names of users' files are left alone: nothing of them is imported here."""
    from rewards.load import names, reward_parameters

    if name in names() and "label" in reward_parameters(name, "load"):
        raise ValueError(
            f"label: beside the name it names the scores, and {name} has a setting `label` too: "
            f"write that as settings: {{label: {short_repr(label)}}}; to name the scores, give both"
        )


class RewardSpec(Settings):
    """A reward: `name` is a file of `rewards/`, or a function in a user's file
    (`my_rewards.py:sharpness`). Keys other than `name`, `label`, `weight` and `sets` are the
    reward's settings: `{name: shapes, kind: strict}` equals `{name: shapes, settings: {kind:
    strict}}`, and `shapes` alone equals `{name: shapes}`."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})
    name: str
    label: str = ""
    """Name of its scores; by default `shapes`, or `shapes.strict` with a kind."""
    weight: float | tuple[tuple[int, float], ...] = 1.0
    """A number, or points `[[0, 1.0], [50, 0.2]]`: linear between iterations, constant outside."""
    sets: Annotated[
        tuple[str, ...], BeforeValidator(_names, json_schema_input_type=str | list[str])
    ] = ()
    """Data sets of `prompts.held_out` that a held-out reward scores; empty: all."""
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"name": data}
        if not isinstance(data, Mapping):
            return data
        fields = {key: data[key] for key in ("name", "label", "weight", "sets") if key in data}
        rest = {key: value for key, value in data.items() if key not in (*fields, "settings")}
        inner = data.get("settings", {})
        if not isinstance(inner, Mapping):
            raise ValueError(
                f"settings: expected a mapping such as {{kind: strict}}, not {short_repr(inner)}"
            )
        settings = {**inner, **rest}
        if isinstance(name := fields.get("name"), str):
            stem, kind = name.rpartition(":")[2], settings.get("kind")
            stem = Path(stem).stem if stem.endswith(".py") else stem
            plain = f"{stem}.{kind}" if isinstance(kind, str) else stem
            if (label := fields.get("label") or plain) != plain and "label" not in settings:
                _refuse_setting(name, label)
            fields["label"] = label
        return {**fields, "settings": settings}

    @model_validator(mode="after")
    def _shown(self) -> "RewardSpec":
        """A label stands in lines of a terminal, which would obey its control characters."""
        if not self.label.isprintable():
            raise ValueError(f"label: {short_repr(self.label)} has characters that are not printed")
        return self

    @model_validator(mode="after")
    def _rising(self) -> "RewardSpec":
        if isinstance(self.weight, tuple):
            at = [iteration for iteration, _ in self.weight]
            if not at or at != sorted(set(at)):
                raise ValueError(
                    "weight: expected points [iteration, weight] with increasing iterations, "
                    f"not {short_repr(at)}"
                )
        return self

    def refuse_python(self, in_python: bool) -> None:
        """ValueError for a Python object that was not passed."""
        if self.name.startswith(IN_PYTHON) and not in_python:
            raise ValueError(
                "it is a Python object, which run.yaml cannot store: resume from Python with "
                f"flowrl.train(resume=RUN, rewards=[{self.label}]), or set its name to "
                "FILE.py:FUNCTION in run.yaml"
            )

    def weight_at(self, iteration: int) -> float:
        """Weight of this reward's scores at an iteration."""
        if not isinstance(self.weight, tuple):
            return self.weight
        at, weights = zip(*self.weight, strict=True)
        return float(np.interp(iteration, at, weights))


def check_sets(
    prompts: PromptFiles, held_out: Sequence[RewardSpec], training: Sequence[RewardSpec]
) -> None:
    """ValueError for rewards of data sets that `prompts.held_out` does not list."""
    for spec in training:
        if spec.sets:
            raise ValueError(
                f"rewards: {spec.label}: sets belongs to held_out_rewards: for training, use the "
                "reward by_row"
            )
    listed = [data_set.label for data_set in prompts.held_out or ()]
    for spec in held_out:
        wrong = [label for label in spec.sets if label not in listed or len(listed) < 2]
        if wrong:
            raise ValueError(
                f"held_out_rewards: {spec.label}: sets has {wrong[0]!r}, but the data sets of a "
                f"list in prompts.held_out are {', '.join(listed[1:] and listed) or 'none'}"
            )
