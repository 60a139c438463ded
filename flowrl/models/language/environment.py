"""Replies of a user's environment to a language model, as tokens after the model's turn."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flowrl.errors import UserError
from flowrl.models.language.stop_texts import StopTexts
from flowrl.models.language.turns import ANSWERED, ASKED, TurnTemplate, turn_template
from flowrl.settings import EnvironmentSettings
from rewards.guard import completed
from rewards.sandbox.templates import TemplateRefused
from samplers.dialogue import EnvironmentReply, state_id
from samplers.number_ranges import is_finite

KEYS = ("reply", "state", "reward")  # of a mapping that the function returns


@dataclass(frozen=True)
class Replies:
    """Calls the user's function and tokenizes its replies.

    `how` names the function; `stop` are tokens and `stop_texts` texts that end a turn;
    `template` are further arguments of the chat template.
    UserError if nothing ends a turn, or if the chat template cannot render a reply.
    """

    how: EnvironmentSettings
    tokenizer: Any
    stop: tuple[int, ...]
    stop_texts: StopTexts | None = None
    template: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.stop and self.stop_texts is None:
            raise UserError(
                "model.environment: no token ends a turn of this model; add a stop token to "
                "model.stop"
            )
        self.encode("a reply", self.stop[:1] or (0,))

    @property
    def turns(self) -> TurnTemplate:
        return turn_template(self.tokenizer, self.template)

    @cached_property
    def function(self) -> Callable[..., Any]:
        return self.how.function()

    def to(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> "Conversation":
        return Conversation(self, prompts, meta or [{} for _ in prompts])

    def described(self) -> list[str]:
        """Sentences for the start: who replies, and what the model sees otherwise than in its
        template."""
        place = f"as the {self.how.role}'s turns" if self.tokenizer.chat_template else "as text"
        said = f"{self.how.name} answers {place}: up to {self.how.turns} turns of the model"
        return [said, *self.turns.rewritten(self.how.role, self.stop)]

    def said(self, turn: Sequence[int]) -> str:
        """Text of a turn, without the stop token or text at its end."""
        text = self._decoded(turn)
        return text if turn[-1] in self.stop else text.removesuffix(self._ending(text))

    def _ending(self, text: str) -> str:
        """The stop text that ended a turn, and what its last token adds."""
        return "" if self.stop_texts is None else text[len(self.stop_texts.before(text)) :]

    def _decoded(self, turn: Sequence[int]) -> str:
        (text,) = self.tokenizer.batch_decode(
            [turn[:-1] if turn[-1] in self.stop else turn],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return text

    def encode(self, reply: str, turn: Sequence[int]) -> list[int]:
        """Tokens between the end of the model's `turn` and the start of its next turn.

        The template renders a whole conversation, and its end is taken, so that sampled tokens are
        never tokenized again. Its end of a turn is left out where the model has written it, and
        only there: a turn that ended at a token or text of model.stop gets it.
        """
        by_token = turn[-1] in self.stop
        said = "" if by_token else self._ending(self._decoded(turn))
        try:
            return self.turns.reply(reply, self.how.role, turn[-1] if by_token else None, said)
        except TemplateRefused as error:
            raise self._refused(reply, error) from error

    def _refused(self, reply: str, error: TemplateRefused) -> UserError:
        """The error of a template that refuses a reply, which names the other role where the
        template takes that."""
        role, other = self.how.role, "user" if self.how.role == "tool" else "tool"
        turns = [("user", ASKED[0]), ("assistant", ANSWERED[0]), (other, reply)]
        if self.turns.tried(turns, opens=True) is None:
            return UserError(
                "model.environment: the chat template allows neither a user turn nor a tool turn "
                f"after the model's ({error}): use a model with another one"
            )
        return UserError(
            f"model.environment: the chat template allows no {role} turn after the model's "
            f"({error}); set model.environment.role: {other}"
        )


@dataclass(frozen=True)
class Conversation:
    """A `samplers.dialogue.Environment` for a batch of prompts and their rows of the prompt
    file."""

    by: Replies
    prompts: Sequence[str]
    meta: Sequence[Mapping[str, Any]]

    @property
    def turns(self) -> int:
        return self.by.how.turns

    def start(self, prompt: int) -> int:
        return state_id(self.prompts[prompt])

    def __call__(self, prompt: int, said: Sequence[Sequence[int]]) -> EnvironmentReply | None:
        """Call the function. UserError if it returns a value that `read_reply` refuses, or raises
        and `errors` is stop."""
        how = self.by.how
        result = self._found(prompt, [self.by.said(turn) for turn in said])
        if (answer := read_reply(result, how.name)) is None:
            return None
        reply, state, reward = answer
        if reply is None:
            return EnvironmentReply((), 0, reward)
        if not (ids := self.by.encode(reply, said[-1])):
            raise UserError(
                f"model.environment: {how.name} returned {reply!r}, which has no tokens; "
                "return None to end the text"
            )
        return EnvironmentReply(ids, state_id(state), reward)

    def _found(self, prompt: int, texts: Sequence[str]) -> Any:
        """The function's result, or what its exception becomes."""
        how, call = self.by.how, (self.prompts[prompt], self.meta[prompt])
        for left in reversed(range(how.tries)):
            try:
                return completed(self.by.function(*call, list(texts), **how.settings))
            except (Exception, SystemExit) as error:  # exit(0) would end the run as if it were done
                if left:
                    continue
                where = f"{how.name} failed after turn {len(texts)} of the prompt {call[0]!r}"
                if how.errors == "stop":
                    raise UserError(
                        f"model.environment: {where}: {type(error).__name__}: {error}"
                    ) from error
                first = "".join(str(error).splitlines()[:1])
                text = f"{type(error).__name__}: {first}"
                then = "this is the reply" if how.errors == "reply" else "the text ends there"
                warnings.warn(f"model.environment: {where}: {text}; {then}", stacklevel=2)
                return text if how.errors == "reply" else None
        raise AssertionError("tries is at least 1")


def read_reply(result: Any, name: str) -> tuple[str | None, str, float | None] | None:
    """Read the reply, the name of the next state (by default, the reply), and the reward of the
    turn that it answers. None ends the text, as does a reply of None. UserError for other values;
    `name` is the function's."""
    parts = result if isinstance(result, Mapping) else {"reply": result}
    if unknown := [key for key in parts if key not in KEYS]:
        raise UserError(
            f"model.environment: {name} returned {', '.join(map(repr, unknown))}; "
            "the known keys are 'reply', 'state' and 'reward'"
        )
    if "reply" not in parts:
        raise UserError(f"model.environment: {name} returned no 'reply'; None would end the text")
    reply, reward = parts["reply"], parts.get("reward")
    number = isinstance(reward, int | float) and not isinstance(reward, bool)
    if reward is not None and not (number and is_finite(reward)):
        raise UserError(
            f"model.environment: {name} must return a number as the reward, not {reward!r:.50}"
        )
    if reply is None:
        return None if reward is None else (None, "", float(reward))
    state = parts.get("state", reply)
    if not isinstance(reply, str):
        raise UserError(f"model.environment: {name} must return a text or None, not {reply!r}")
    if not isinstance(state, str):
        raise UserError(f"model.environment: {name} must return a text as the state, not {state!r}")
    return reply, state, None if reward is None else float(reward)
