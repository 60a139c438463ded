"""What a user's environment says to a language model, as tokens behind the model's turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

from jinja2 import TemplateError

from flowrl.errors import UserError
from flowrl.settings import EnvironmentSettings
from samplers.dialogue import EnvironmentReply, state_id

TURN = "the turn before"  # stands for the model's own words while a reply is rendered
KEYS = ("reply", "state")  # of a mapping that the function gives


@dataclass(frozen=True)
class Replies:
    """`how` names the function; `stop` are tokens that end a turn. UserError where no turn can end,
    or where the chat template has no place for a reply."""

    how: EnvironmentSettings
    tokenizer: Any
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.stop:
            raise UserError(
                "model.environment: no token ends a turn of this model; name one in model.stop"
            )
        self.encode("a reply")

    @cached_property
    def function(self) -> Callable[..., Any]:
        return self.how.function()

    def to(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> "Conversation":
        return Conversation(self, prompts, meta or [{} for _ in prompts])

    def told(self) -> str:
        place = f"as the {self.how.role}'s turns" if self.tokenizer.chat_template else "as text"
        return f"{self.how.name} answers {place}: up to {self.how.turns} turns of the model"

    def encode(self, reply: str) -> list[int]:
        """Tokens from behind the stop token that ended the model's turn to the start of its next.

        A template is asked for a whole conversation, of which this is the end, so that no token
        that the model has drawn is ever read anew.
        """
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer(reply, add_special_tokens=False).input_ids)
        turns = [("user", "a prompt"), ("assistant", TURN), (self.how.role, reply)]
        try:
            whole = self.tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in turns],
                add_generation_prompt=True,
                tokenize=False,
            )
        except TemplateError as error:
            raise UserError(
                f"model.environment: the chat template has no turn of the {self.how.role} behind "
                f"the model's ({error}); set model.environment.role"
            ) from error
        _, turn, rest = whole.partition(TURN)
        if not turn:
            raise UserError("model.environment: the chat template does not show the model's turns")
        ends = (self.tokenizer.decode([i]) for i in self.stop)
        rest = next((rest.removeprefix(end) for end in ends if rest.startswith(end)), rest)
        return list(self.tokenizer(rest, add_special_tokens=False).input_ids)


@dataclass(frozen=True)
class Conversation:
    """A `samplers.dialogue.Environment` of a batch of prompts and their rows of the file."""

    by: Replies
    prompts: Sequence[str]
    meta: Sequence[Mapping[str, Any]]

    @property
    def turns(self) -> int:
        return self.by.how.turns

    def start(self, prompt: int) -> int:
        return state_id(self.prompts[prompt])

    def __call__(self, prompt: int, said: Sequence[Sequence[int]]) -> EnvironmentReply | None:
        """UserError if the function raises, or gives what `read_reply` does not take."""
        stop, how = self.by.stop, self.by.how
        texts = self.by.tokenizer.batch_decode(
            [turn[:-1] if turn[-1] in stop else turn for turn in said],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        with _Named(how.name, self.prompts[prompt], len(said)):
            found = self.by.function(self.prompts[prompt], self.meta[prompt], texts, **how.settings)
        if (answer := read_reply(found, how.name)) is None:
            return None
        reply, state = answer
        if not (ids := self.by.encode(reply)):
            raise UserError(
                f"model.environment: {how.name} answered {reply!r}, which has no token; None ends "
                "a text"
            )
        return EnvironmentReply(ids, state_id(state))


def read_reply(found: Any, name: str) -> tuple[str, str] | None:
    """The reply, and the name of the state that the model then decides in: the reply itself, if the
    function `name` does not say. None for the end, UserError for what is neither."""
    parts = found if isinstance(found, Mapping) else {"reply": found}
    if unknown := [key for key in parts if key not in KEYS]:
        raise UserError(
            f"model.environment: {name} gave {', '.join(map(repr, unknown))}, and only 'reply' and "
            "'state' are known"
        )
    if "reply" not in parts:
        raise UserError(f"model.environment: {name} gave no 'reply'; None there ends a text")
    reply = parts["reply"]
    if reply is None:
        return None
    state = parts.get("state", reply)
    if not isinstance(reply, str):
        raise UserError(f"model.environment: {name} must give a text or None, not {reply!r}")
    if not isinstance(state, str):
        raise UserError(f"model.environment: {name} must name a state by a text, not {state!r}")
    return reply, state


@dataclass(frozen=True)
class _Named:
    """Says which function failed, at what, instead of whatever is raised inside."""

    name: str
    prompt: str
    turns: int

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            raise UserError(
                f"model.environment: {self.name} failed after turn {self.turns} of the prompt "
                f"{self.prompt!r}: {type(error).__name__}: {error}"
            ) from error
