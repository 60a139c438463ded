"""The base of all settings: frozen, no unknown keys, no infinite numbers."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class OnResume(Enum):
    """Whether a setting may change when a run resumes."""

    FREE = "free"  # it changes no number but through rounding, or no number of training
    SAID = "said"  # it may change, and the resumed run names the change in one line
    NEVER = "never"  # weights or states would mean something else


class Settings(BaseModel):
    """A section of a run file."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # in help and in editors
    )
    ON_RESUME: ClassVar[Mapping[str, OnResume]] = {}  # by field; for others, that of the section

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true`, which Python counts as 1 and YAML also spells `yes` and `on`."""
        if isinstance(value, bool) and info.field_name:
            annotation = cls.model_fields[info.field_name].annotation
            kinds = {*(get_args(annotation) or (annotation,))}
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"input should be a number, not {str(value).lower()}")
        return value
