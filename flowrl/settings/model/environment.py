"""Turns and steps of a language model: a user's function that replies, or separators of texts."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from flowrl.algorithm import Algorithm
from flowrl.credit.process import Information
from flowrl.credit.turns import States
from flowrl.errors import UserError
from flowrl.prompts import PromptSet
from flowrl.settings.base import Settings
from rewards.load import CodeName, user_function_of
from rewards.types import cell
from rewards.user_function import has_mapping
from samplers.completions import TextPlan

ONE_CREDIT = (
    "model.environment rewards single turns, but all turns share one credit in this recipe: use "
    "text_rebn, text_turns or text_gigpo, or leave out the key 'reward'"
)


class EnvironmentSettings(Settings):
    """A user's function, `reply(prompt, meta, turns, **settings)`, `async` or not.

    `meta` is the prompt's row of the file, `turns` are the model's texts so far.
    It returns the reply, or None to end the text, and must be deterministic.

    It may also return {"reply": text, "state": name}: recipes with an advantage per turn compare
    the turns of a prompt that start from the same state. The state defaults to the reply, and the
    first turn's state to the prompt. {"reply": ..., "reward": number} rewards the turn before the
    reply, also if the reply is None, for recipes with turn-level returns.
    """

    name: CodeName
    """FILE.py:FUNCTION, such as my_env.py:reply."""
    turns: int = Field(default=4, ge=1)
    """Maximum number of turns of the model. The recipe's length limits all turns and replies
    together."""
    role: Literal["user", "tool"] = "user"
    """Role of a reply in the chat template; without a template it is plain text."""
    shows: Literal["transcript", "last"] = "transcript"
    """The text that rewards score: all turns and replies, or the model's last turn."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of the function."""
    errors: Literal["stop", "reply", "end"] = "stop"
    """What an exception of the function becomes: the end of the run, a reply with its type and
    first line, or the end of that text."""
    tries: int = Field(default=1, ge=1)
    """Calls of the function for one reply, while it raises exceptions."""
    at_once: int = Field(default=1, ge=1)
    """Texts whose replies are asked for side by side, in threads. Each text's replies come in
    order, so the results do not depend on it."""

    def function(self) -> Callable[..., Any]:
        """Load the function. UserError if it is missing or does not take its arguments."""
        try:
            function = user_function_of(self.name)
            inspect.signature(function).bind("", {}, (), **self.settings)
        except TypeError as error:
            raise UserError(
                f"model.environment: {self.name} must take (prompt, meta, turns) and its settings: "
                f"{error}"
            ) from error
        except ValueError as error:
            raise UserError(f"model.environment: {error}") from error
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UserError(
                f"model.environment: {self.name} yields, and its call must return the reply: write "
                "`return`"
            )
        return function

    def check_rewards(self, algorithm: Algorithm) -> None:
        """UserError for a function that rewards single turns, as far as its source shows, where all
        turns of a sample have one credit."""
        if not algorithm.by_turn and has_mapping(self.function(), {"reply", "reward"}):
            raise UserError(ONE_CREDIT)

    def description(self, length: int) -> str:
        """A sentence for `flowrl plan`. `length`: the number of tokens in a text."""
        return (
            f"{self.name} replies between the turns: at most {self.turns} turns of the model, "
            f"{length} tokens with the replies"
        )

    def check(self, algorithm: Algorithm) -> None:
        """UserError for trees, whose branches would share text although replies differ."""
        for plan in algorithm.planned([0.0] * (algorithm.steps + 1), 0, 0):
            assert isinstance(plan, TextPlan)
            if plan.cuts or plan.forking is not None:
                raise UserError(
                    "model.environment: texts of several turns need independent samples, but "
                    "this recipe samples trees; leave model.environment out, or choose another "
                    "recipe"
                )


class StepSettings(Settings):
    """Steps of a completion, each with credit of its own: parts of its text between separators.

    `intermediate_rewards` score the text up to the end of each step.
    """

    separator: str = Field(default="\n\n", min_length=1)
    """Text that ends a step."""
    most: int = Field(default=16, ge=2)
    """Most steps of a completion; the last one has the rest of its text."""

    def description(self) -> str:
        """A sentence for `flowrl plan`."""
        return f"at most {self.most} steps, which end with {self.separator!r}"


def check_turns(
    environment: EnvironmentSettings | None,
    steps: StepSettings | None,
    algorithm: Algorithm,
    rewarded: bool,
) -> None:
    """UserError for turns or steps that do not fit the recipe. `rewarded`: whether the run names
    rewards of turns or steps in `intermediate_rewards`."""
    if environment is not None and steps is not None:
        raise UserError(
            "model.steps: turns are the decisions of a run with model.environment: leave one of "
            "the two out"
        )
    if environment is not None:
        environment.check(algorithm)
    elif steps is None and algorithm.by_turn:
        raise UserError(
            "this recipe compares turns or steps, but without model.environment or model.steps a "
            "text has only one: set model.environment (a function that replies) or model.steps (a "
            "separator), or choose another recipe"
        )
    if steps is not None and not algorithm.by_turn:
        raise UserError(
            "model.steps: this recipe has one credit for a whole completion: take text_process, "
            "text_igpo, text_turns or text_rebn, or leave steps out"
        )
    if steps is not None and any(
        isinstance(transform, States) for transform in algorithm.transforms
    ):
        raise UserError(
            "model.steps: this recipe compares turns in the same state, and steps have none: take "
            "text_process, or set model.environment"
        )
    if steps is not None and algorithm.information is None and not rewarded:
        raise UserError(
            "model.steps: no reward scores the steps: name one in intermediate_rewards, such as "
            "process_reward or judge"
        )


def check_answers(asked: Information, prompts: PromptSet) -> None:
    """UserError for a prompt without the answer whose probability IGPO rewards turns for."""
    for text, row in zip(prompts.texts, prompts.meta or [{} for _ in prompts.texts], strict=True):
        if cell(row, asked.column) in (None, ""):
            raise UserError(
                f"recipe.answer: the prompt {text!r:.60} has no answer in the column "
                f"{asked.column!r}, for whose probability turns are rewarded: name another column"
            )
