"""Convert prompts to tokens with a tokenizer's own chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.errors import UserError
from flowrl.models.language.turns import turn_template
from flowrl.prompts import Chat, has_images
from flowrl.prompts.source import way_without_row
from rewards.sandbox.templates import TemplateLate, TemplateRefused, render_chat


def chat_tokens(
    tokenizer: Any, prompt: str, system: str | None, template: Mapping[str, Any]
) -> list[int]:
    """Tokens of a text as a user turn, or of a `Chat`, up to the start of the model's turn.

    `system` is the system message for prompts without one, `template` further arguments of the
    template. UserError for messages that the template refuses, such as two consecutive messages of
    the same role, and for images.
    """
    if has_images(prompt):
        raise images_refused(prompt)
    turns = turn_template(tokenizer, template).messages(chat_turns(prompt, system))
    text = rendered(tokenizer, turns, prompt, template)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def images_refused(prompt: str) -> UserError:
    place = prompt_place(prompt)
    return UserError(
        f"{place}: the prompt has images, but model.language only reads texts: use a "
        f"vision-language model, or {way_without_row(place)}"
    )


def chat_turns(prompt: str, system: str | None) -> list[Any]:
    """Messages of a prompt; a text is the user's turn."""
    turns: list[Any] = [{"role": "user", "content": prompt}]
    if isinstance(prompt, Chat):
        turns = list(prompt.messages)
    if system is not None and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": system}, *turns]
    return turns


def prompt_place(prompt: str) -> str:
    """Place of a prompt in its file, or its beginning, for messages."""
    return prompt.at if isinstance(prompt, Chat) else f"the prompt {prompt[:40]!r}"


def rendered(
    templates: Any,
    turns: Sequence[Any],
    prompt: str,
    template: Mapping[str, Any],
) -> str:
    """Messages through the chat template of a tokenizer or processor. UserError if it refuses
    them."""
    try:
        return render_chat(templates, turns, add_generation_prompt=True, **template)
    except TemplateLate as error:
        raise UserError(
            f"{prompt_place(prompt)}: model.language: {error}: use a model with another one"
        ) from error
    except TemplateRefused as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise UserError(
            f"{prompt_place(prompt)}: the chat template of model.language rejects messages of "
            f"{roles} ({error}); use the order that it expects, or remove model.system"
        ) from error
