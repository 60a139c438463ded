"""Settings that name a class or a function of a user's file, with its own settings beside it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from flowrl.errors import UserError
from flowrl.settings.base import Settings
from flowrl.settings.parts.own_parts import FILE_AND_NAME, is_code
from flowrl.settings.parts.trials import own_error
from rewards.load import CodeName, own_settings, user_function_of


class OwnCode(Settings):
    """`mine.py:NAME`, or `{name: mine.py:NAME, ...settings}`: keys other than `name` are the
    arguments of the class or function.

    WHAT   the word for what it makes, in messages
    PLACE  the setting, in messages
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})
    WHAT: ClassVar[str]
    PLACE: ClassVar[str]
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
                f"your own {cls.WHAT} must be {FILE_AND_NAME} or {{name: {FILE_AND_NAME}, "
                f"...settings}}, not {name!r}"
            )
        rest = {k: v for k, v in value.items() if k not in ("name", "settings")}
        return {"name": name, "settings": {**value.get("settings", {}), **rest}}

    def check(self) -> tuple[Any, dict[str, Any]]:
        """The class or function, with its arguments converted. UserError if they are invalid."""
        try:
            function = user_function_of(self.name)
            return function, own_settings(self.name, function, self.settings)
        except ValueError as error:
            raise UserError(f"{self.PLACE}: {error}") from error
        except Exception as error:  # the user's file runs here, and may raise anything
            raise UserError(f"{self.PLACE}: {own_error(self.name, error)}") from error

    def called(self, within: AbstractContextManager[object] = nullcontext()) -> Any:
        """Call the class or function with its settings, in a context that does not hold for
        the import of its file. UserError if the user's code raises."""
        function, settings = self.check()
        try:
            with within:
                return function(**settings)
        except Exception as error:  # the user's code
            raise UserError(f"{self.PLACE}: {own_error(self.name, error)}") from error
