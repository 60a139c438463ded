"""The use that a run makes of its language model, which its constructor reads for good.

A system message, what ends a completion, who replies, and which savings are on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.errors import UserError
from flowrl.models.language.server import CompletionsServer
from flowrl.models.language.stop_texts import StopTexts
from flowrl.models.language.turns import turn_template
from flowrl.settings import EnvironmentSettings
from flowrl.settings.model.environment import StepSettings


@dataclass(frozen=True)
class TextUse:
    """A run's settings of its language model.

    system         message before prompts that have none
    stop           further tokens and texts that end a completion
    temperature    of evaluations
    template       further arguments of the chat template
    steps          how completions are cut into steps; None: a completion is one step
    environment    who replies between the model's turns; None: a completion is one turn
    adapt_vision   whether the part that reads images gets adapters
    share_prompts  whether texts that begin alike share the evaluation of their beginning
    float32_head   whether logits are computed in float32
    """

    system: str | None = None
    stop: Sequence[str] = ()
    temperature: float = 1.0
    template: Mapping[str, Any] = field(default_factory=dict[str, Any])
    steps: StepSettings | None = None
    environment: EnvironmentSettings | None = None
    adapt_vision: bool = False
    share_prompts: bool = False
    float32_head: bool = False

    def check(self, tokenizer: Any) -> None:
        """UserError for settings of a chat template that the tokenizer does not have."""
        for name, value in (("system", self.system), ("template", self.template)):
            if value and tokenizer.chat_template is None:
                raise UserError(
                    f"model.{name}: this tokenizer has no chat template; remove the setting"
                )


@dataclass(frozen=True)
class Stops:
    """The ends of a completion.

    tokens  single tokens, in ascending order
    texts   texts of several tokens; None if there are none
    """

    tokens: list[int]
    texts: StopTexts | None = None

    @classmethod
    def of(cls, tokenizer: Any, published: Sequence[int], use: TextUse) -> "Stops":
        """The published stop tokens, the token that ends the model's turn in its chat template,
        and `use.stop`. UserError for a text without tokens, or that decoded texts never contain."""
        ends = [
            turn_template(tokenizer, {}).end_before("user"),
            turn_template(tokenizer, use.template).end_before("user"),
        ]
        if use.environment is not None:  # the model's turn may end otherwise before its role
            role = use.environment.role
            ends.append(turn_template(tokenizer, use.template).end_before(role))
        tokens, texts = {*published, *(end for end in ends if end is not None)}, list[str]()
        for text in use.stop:
            ids = tokenizer(text, add_special_tokens=False).input_ids
            if not text or not ids:
                raise UserError(f"model.stop: {text!r} has no tokens; leave it out")
            if len(ids) == 1:
                tokens.update(ids)
            else:
                texts.append(text)
        return cls(sorted(tokens), StopTexts(tuple(texts), tokenizer) if texts else None)


OpenServer = Callable[[Any, Stops], CompletionsServer]
"""Opens the server that samples in place of a model, whose completions end at these stops."""
