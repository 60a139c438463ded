"""Replies of a user's environment to a language model, as tokens after the model's turn."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flowrl.errors import UserError
from flowrl.models.language.stop_texts import StopTexts
from flowrl.settings import EnvironmentSettings
from samplers.dialogue import EnvironmentReply, state_id

TURN = "the turn before"  # placeholder for the model's turn while a reply is rendered
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
        self.encode("a reply")

    @cached_property
    def function(self) -> Callable[..., Any]:
        return self.how.function()

    def to(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> "Conversation":
        return Conversation(self, prompts, meta or [{} for _ in prompts])

    def described(self) -> str:
        place = f"as the {self.how.role}'s turns" if self.tokenizer.chat_template else "as text"
        return f"{self.how.name} answers {place}: up to {self.how.turns} turns of the model"

    def said(self, turn: Sequence[int]) -> str:
        """Text of a turn, without the stop token or text at its end."""
        by_token = turn[-1] in self.stop
        (text,) = self.tokenizer.batch_decode(
            [turn[:-1] if by_token else turn],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return text if by_token or self.stop_texts is None else self.stop_texts.before(text)

    def encode(self, reply: str, by_token: bool = True) -> list[int]:
        """Tokens between the end of the model's turn and the start of its next turn. `by_token`:
        the turn already includes its stop token.

        The template renders a whole conversation, and its end is taken, so that sampled tokens are
        never tokenized again.
        """
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer(reply, add_special_tokens=False).input_ids)
        turns = [("user", "a prompt"), ("assistant", TURN), (self.how.role, reply)]
        try:
            whole = self.tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in turns],
                add_generation_prompt=True,
                tokenize=False,
                **self.template,
            )
        except Exception as error:  # the model's own template, which may raise anything
            raise UserError(
                f"model.environment: the chat template allows no {self.how.role} turn after the "
                f"model's ({error}); set model.environment.role"
            ) from error
        _, turn, rest = whole.partition(TURN)
        if not turn:
            raise UserError("model.environment: the chat template leaves out the model's turns")
        ends = (self.tokenizer.decode([i]) for i in self.stop)
        if by_token:
            rest = next((rest.removeprefix(end) for end in ends if rest.startswith(end)), rest)
        return list(self.tokenizer(rest, add_special_tokens=False).input_ids)


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
        """Call the function. UserError if it raises, or returns a value that `read_reply`
        refuses."""
        how, texts = self.by.how, [self.by.said(turn) for turn in said]
        with _named(how.name, self.prompts[prompt], len(said)):
            found = self.by.function(self.prompts[prompt], self.meta[prompt], texts, **how.settings)
        if (answer := read_reply(found, how.name)) is None:
            return None
        reply, state, reward = answer
        if reply is None:
            return EnvironmentReply((), 0, reward)
        if not (ids := self.by.encode(reply, said[-1][-1] in self.by.stop)):
            raise UserError(
                f"model.environment: {how.name} returned {reply!r}, which has no tokens; "
                "return None to end the text"
            )
        return EnvironmentReply(ids, state_id(state), reward)


def read_reply(found: Any, name: str) -> tuple[str | None, str, float | None] | None:
    """Read the reply, the name of the next state (by default, the reply), and the reward of the
    turn that it answers. None ends the text, as does a reply of None. UserError for other values;
    `name` is the function's."""
    parts = found if isinstance(found, Mapping) else {"reply": found}
    if unknown := [key for key in parts if key not in KEYS]:
        raise UserError(
            f"model.environment: {name} returned {', '.join(map(repr, unknown))}; "
            "the known keys are 'reply', 'state' and 'reward'"
        )
    if "reply" not in parts:
        raise UserError(f"model.environment: {name} returned no 'reply'; None would end the text")
    reply, reward = parts["reply"], parts.get("reward")
    number = isinstance(reward, int | float) and not isinstance(reward, bool)
    if reward is not None and not (number and math.isfinite(reward)):
        raise UserError(
            f"model.environment: {name} must return a number as the reward, not {reward!r}"
        )
    if reply is None:
        return None if reward is None else (None, "", float(reward))
    state = parts.get("state", reply)
    if not isinstance(reply, str):
        raise UserError(f"model.environment: {name} must return a text or None, not {reply!r}")
    if not isinstance(state, str):
        raise UserError(f"model.environment: {name} must return a text as the state, not {state!r}")
    return reply, state, None if reward is None else float(reward)


@contextmanager
def _named(name: str, prompt: str, turns: int) -> Iterator[None]:
    """Turn any error of the function into a UserError that names it, the prompt and the turn."""
    try:
        yield
    except (Exception, SystemExit) as error:  # exit(0) would end the run as if it were done
        raise UserError(
            f"model.environment: {name} failed after turn {turns} of the prompt {prompt!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
