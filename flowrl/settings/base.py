"""The base class of all settings: frozen, no unknown keys, no infinite numbers."""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, model_validator

WITHOUT_COMMAS = "without commas"
Name = Annotated[str, WITHOUT_COMMAS]  # a text that has none, so that an option's list may use them


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

    @model_validator(mode="before")
    @classmethod
    def _no_switch(cls, data: Any) -> Any:
        """Refuse `true` as a number, which Python counts as 1 and YAML also spells `yes` and
        `on`."""
        if not isinstance(data, Mapping):
            return data
        values: Mapping[Any, Any] = data
        for name, value in values.items():
            field = cls.model_fields.get(str(name).replace("-", "_"))
            if isinstance(value, bool) and field is not None:
                kinds = {*(get_args(field.annotation) or (field.annotation,))}
                if kinds & {int, float} and bool not in kinds:
                    raise ValueError(f"{name} must be a number, not {str(value).lower()}")
        return values
