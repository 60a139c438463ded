"""Prompts as tokens by a tokenizer's own chat template."""

from typing import Any

from jinja2 import TemplateError

from flowrl.errors import UserError
from flowrl.prompts import Chat


def chat_tokens(tokenizer: Any, prompt: str, system: str | None) -> list[int]:
    """Tokens of a text as a user turn, or of a `Chat`, up to the start of the model's turn.

    `system` is the system message of prompts without one. UserError for messages that the template
    refuses, such as two of the same role in a row.
    """
    turns: list[Any] = [{"role": "user", "content": prompt}]
    if isinstance(prompt, Chat):
        turns = list(prompt.messages)
    if system is not None and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": system}, *turns]
    try:
        return tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in turns)
        at = prompt.at if isinstance(prompt, Chat) else f"the prompt {prompt[:40]!r}"
        raise UserError(
            f"{at}: the chat template of model.language rejects messages of {roles} ({error}); "
            "use the order that it expects, or remove model.system"
        ) from error
