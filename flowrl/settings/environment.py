"""Who answers a language model between its turns: a function of a user's own."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tyro
from pydantic import Field

from flowrl.algorithm import Algorithm
from flowrl.errors import UserError
from flowrl.settings.base import Settings
from rewards.load import own_function
from samplers.completions import TextPlan


class EnvironmentSettings(Settings):
    """A function of your own, `reply(prompt, meta, turns, **settings)`: `meta` is the prompt's row
    of the file, `turns` are the texts that the model has written so far. It gives what is answered,
    or None, which ends the text. It must answer the same to the same.

    Instead of a text it may give {"reply": text, "state": name}: turns of a prompt that are taken
    in the same state are compared by recipes that tell turns apart. A state that is not named is
    the reply itself, that of the first turn is the prompt."""

    name: str
    """A function of a file, such as my_env.py:reply."""
    turns: int = Field(default=4, ge=1)
    """Most turns of the model. All of them and the replies share the recipe's length."""
    role: Literal["user", "tool"] = "user"
    """Whose turn a reply is in the chat template; without a template it is plain text."""
    shows: Literal["transcript", "last"] = "transcript"
    """What rewards see: all turns with the replies between them, or the model's last turn."""
    settings: Annotated[dict[str, Any], tyro.conf.Fixed] = Field(default_factory=dict)
    """Further arguments of the function."""

    def function(self) -> Callable[..., Any]:
        """UserError where there is none, or it does not take what it would be given."""
        try:
            found = own_function(self.name)
            inspect.signature(found).bind("", {}, (), **self.settings)
        except TypeError as error:
            raise UserError(
                f"model.environment: {self.name} must take (prompt, meta, turns) and its settings: "
                f"{error}"
            ) from error
        except ValueError as error:
            raise UserError(f"model.environment: {error}") from error
        return found

    def told(self, length: int) -> str:
        return (
            f"{self.name} answers in between: up to {self.turns} turns of the model, which share "
            f"{length} tokens with the replies"
        )

    def check(self, algorithm: Algorithm) -> None:
        """UserError for trees, whose branches would each need replies of their own."""
        for plan in algorithm.plan([0.0] * (algorithm.steps + 1), 0, 0):
            assert isinstance(plan, TextPlan)
            if plan.cuts or plan.forking is not None:
                raise UserError(
                    "model.environment: texts of several turns are drawn apart, and this recipe "
                    "draws trees; leave model.environment out, or take another recipe"
                )
