"""Prompt files, and the rewards that score the samples."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from flowrl.settings.base import Settings
from flowrl.settings.strict_yaml import short_repr


class PromptFiles(Settings):
    """Prompts of training and of evaluation: files, folders or data sets of the hub."""

    train: str = Field(min_length=1)
    held_out: str | None = Field(default=None, min_length=1)
    per_iteration: int = Field(default=16, ge=1, le=1_000_000)
    """Prompts drawn per iteration; each gets a group of samples."""
    column: str = "prompt"
    """Column of the file that holds the prompts."""


class RewardSpec(Settings):
    """A reward: `name` is a file of `rewards/`, or a function of a user's file
    (`my_rewards.py:sharpness`). Other keys than `name`, `label` and `weight` are that reward's
    settings: `{name: shapes, kind: strict}` equals `{name: shapes, settings: {kind: strict}}`, and
    `shapes` alone equals `{name: shapes}`."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})
    name: str
    label: str = ""
    """Name of its scores; by default `shapes`, or `shapes.strict` with a kind."""
    weight: float | tuple[tuple[int, float], ...] = 1.0
    """A number, or points `[[0, 1.0], [50, 0.2]]`: linear between iterations, constant outside."""
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"name": data}
        if not isinstance(data, Mapping):
            return data
        own = {key: data[key] for key in ("name", "label", "weight") if key in data}
        rest = {key: value for key, value in data.items() if key not in (*own, "settings")}
        inner = data.get("settings", {})
        if not isinstance(inner, Mapping):
            raise ValueError(
                f"settings: expected a mapping such as {{kind: strict}}, not {short_repr(inner)}"
            )
        settings = {**inner, **rest}
        if not own.get("label") and isinstance(own.get("name"), str):
            stem = own["name"].rpartition(":")[2]
            kind = settings.get("kind")
            stem = Path(stem).stem if stem.endswith(".py") else stem
            own["label"] = f"{stem}.{kind}" if isinstance(kind, str) else stem
        return {**own, "settings": settings}

    @model_validator(mode="after")
    def _rising(self) -> "RewardSpec":
        if isinstance(self.weight, tuple):
            at = [iteration for iteration, _ in self.weight]
            if not at or at != sorted(set(at)):
                raise ValueError(
                    f"weight: points [iteration, weight] in rising order, not {short_repr(at)}"
                )
        return self

    def weight_at(self, iteration: int) -> float:
        """The weight of this reward's scores at an iteration."""
        if not isinstance(self.weight, tuple):
            return self.weight
        at, weights = zip(*self.weight, strict=True)
        return float(np.interp(iteration, at, weights))
