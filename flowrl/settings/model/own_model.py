"""`model.own`: a model from a user's file, by its class and the class's settings."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator, field_validator

from flowrl.settings.base import OnResume, Settings
from flowrl.settings.model.levels import Sigmas, checked_sigmas
from flowrl.settings.model.model import ModelSettings
from flowrl.settings.model.own_code import OwnCode
from flowrl.settings.words.short_forms import model_of_own
from rewards.rights import ReadFile


class OwnModelSettings(OwnCode):
    """A model from a user's file, `mine.py:MyFlow`, or `{name: mine.py:MyFlow, ...settings}`: a
    class of torch.nn.Module, or a function that returns one. Keys other than `name` are its
    arguments. See docs/own_models.md."""

    WHAT: ClassVar[str] = "model"
    PLACE: ClassVar[str] = "model.own"

    def build(self, device: str = "cpu") -> Any:
        """Build the model. Its random initial weights are always the same. UserError if the user's
        code raises."""
        return self.called(_weights_on(device))


@contextmanager
def _weights_on(device: str) -> Iterator[None]:
    """New weights are on the device, and always the same; other random numbers go on as before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        with torch.device(device):
            yield


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
