"""The base of all settings: frozen, no unknown keys, no infinite numbers."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A part of a run's file."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False
    )
