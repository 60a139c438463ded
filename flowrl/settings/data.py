"""Prompts, and the rewards that score what is made of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from pydantic import ConfigDict, Field, model_validator

from flowrl.settings.base import Settings


class PromptFiles(Settings):
    train: str
    held_out: str | None = None
    per_iteration: int = Field(default=16, ge=1)
    """Draws an iteration; each is a group of samples of one prompt."""
    column: str = "prompt"


class RewardSpec(Settings):
    """`name` is a file of `rewards/`, or a function of your own (`my_rewards.py:sharpness`). Keys
    beside `name`, `label` and `weight` are that reward's settings: `{name: shapes, kind: strict}`
    and `{name: shapes, settings: {kind: strict}}` are the same."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})
    name: str
    label: str = ""
    """How its scores are called; by default `shapes`, or `shapes.strict` with a kind."""
    weight: float | tuple[tuple[int, float], ...] = 1.0
    """A number, or points `[[0, 1.0], [50, 0.2]]`: linear between iterations, flat outside."""
    settings: Annotated[dict[str, Any], tyro.conf.Fixed] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        own = {key: data[key] for key in ("name", "label", "weight") if key in data}
        rest = {key: value for key, value in data.items() if key not in (*own, "settings")}
        settings = {**data.get("settings", {}), **rest}
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
                raise ValueError(f"weight: points [iteration, weight] in rising order, not {at}")
        return self

    def weight_at(self, iteration: int) -> float:
        if not isinstance(self.weight, tuple):
            return self.weight
        at, weights = zip(*self.weight, strict=True)
        return float(np.interp(iteration, at, weights))
