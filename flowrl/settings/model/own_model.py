"""`model.own`: a model from a user's file, by its class and the class's settings."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from flowrl.errors import UserError
from flowrl.settings.base import OnResume, Settings
from flowrl.settings.model.levels import Sigmas, checked_sigmas
from flowrl.settings.model.model import ModelSettings
from flowrl.settings.parts.own_parts import FILE_AND_NAME, is_code
from flowrl.settings.parts.trials import own_error
from flowrl.settings.words.short_forms import model_of_own
from rewards.load import CodeName, own_settings, user_function_of
from rewards.rights import ReadFile


class OwnModelSettings(Settings):
    """A model from a user's file, `mine.py:MyFlow`, or `{name: mine.py:MyFlow, ...settings}`: a
    class of torch.nn.Module, or a function that returns one. Keys other than `name` are its
    arguments. See docs/own_models.md."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})
    name: CodeName
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        name = value.get("name")
        if not is_code(name):
            raise ValueError(
                f"your own model must be {FILE_AND_NAME} or {{name: {FILE_AND_NAME}, ...settings}}"
                f", not {name!r}"
            )
        rest = {k: v for k, v in value.items() if k not in ("name", "settings")}
        return {"name": name, "settings": {**value.get("settings", {}), **rest}}

    def check(self) -> tuple[Any, dict[str, Any]]:
        """The class or function, with its arguments converted. UserError if they are invalid."""
        try:
            found = user_function_of(self.name)
            return found, own_settings(self.name, found, self.settings)
        except ValueError as error:
            raise UserError(f"model.own: {error}") from error
        except Exception as error:  # the user's file runs here, and may raise anything
            raise UserError(f"model.own: {own_error(self.name, error)}") from error

    def build(self, device: str = "cpu") -> Any:
        """Build the model. Its random initial weights are always the same. UserError if the user's
        code raises."""
        found, settings = self.check()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            try:
                with torch.device(device):
                    return found(**settings)
            except Exception as error:  # the user's code
                raise UserError(f"model.own: {own_error(self.name, error)}") from error


class NamedOwnModel(Settings):
    """The setting that names a user's own model, before the settings of all models."""

    own: Annotated[
        OwnModelSettings,
        BeforeValidator(model_of_own, json_schema_input_type=OwnModelSettings | str),
    ]
    """Your own model, FILE.py:NAME or {name: FILE.py:NAME, ...settings}."""


class OwnSettings(ModelSettings, NamedOwnModel):
    """A user's own model, whose calls flowrl makes."""

    KIND: ClassVar[str] = "own"
    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {
        **ModelSettings.ON_RESUME,
        "weights": OnResume.NEVER,
    }
    weights: ReadFile | None = None
    """A safetensors file with the weights of `own`; null: the weights that it is created with."""
    sigmas: Sigmas | None = None
    """Noise levels in place of the pipeline's own: {shift: 3.0}, evenly spaced levels with a shift;
    a list that decreases from at most 1, one per step (the final 0 may be left out); or
    FILE.py:FUNCTION, which maps a number of steps to such a list. For flows whose call takes
    `sigmas`."""

    @property
    def source(self) -> str:
        return self.own.name

    @field_validator("sigmas", mode="before")
    @classmethod
    def _levels(cls, value: Any) -> Any:
        return checked_sigmas(value)
