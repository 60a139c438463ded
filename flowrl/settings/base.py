"""What all settings share: unknown keys are errors, and nothing changes afterwards."""

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class OnResume(Enum):
    """Whether a setting may change between the start of a run and its resume."""

    FREE = "free"  # it changes no number but through rounding, or no number of training
    SAID = "said"  # it may change, and the resumed run names the change in one line
    NEVER = "never"  # weights or states would mean something else


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {}  # by field; for others, that of the section
