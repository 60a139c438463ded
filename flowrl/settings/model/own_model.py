"""`model.own`: a model from a user's file, by its class and the class's settings."""

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ConfigDict, Field, model_validator

from flowrl.errors import UserError
from flowrl.settings.base import Settings
from flowrl.settings.parts.own_parts import FILE_AND_NAME, is_code
from flowrl.settings.parts.trials import own_error
from rewards.load import CodeName, own_settings, user_function_of


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
