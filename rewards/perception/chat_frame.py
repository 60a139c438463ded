"""The texts around a user's turn in a base model's chat template. MiMo-VL's system sentence differs
from Qwen's, and a reward's head was trained with its own."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewards.sandbox.templates import TemplateLate, TemplateRefused, render_chat

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
_PROBE = " \n a text\n "  # that a chat template must keep as it is


def vision_block(pads: str) -> str:
    return f"<|vision_start|>{pads}<|vision_end|>"


def chat_frame(reward: str, base: str, tokenizer: Any) -> tuple[str, str]:
    """Texts that the base's chat template puts before and after a user turn, with placeholders for
    media and text in between.

    ValueError without a template, and for a template that does not write images and videos followed
    by the unchanged text.
    """
    template = _processor_template(base) or tokenizer.chat_template
    if template is None:
        raise ValueError(
            f"{reward}: {base} has no chat template, which its authors use to write turns: use a "
            "folder with one"
        )
    parts = [{"type": "image"}, {"type": "video"}, {"type": "text", "text": _PROBE}]
    turns = [{"role": "user", "content": parts}]
    written = templated(tokenizer, turns, chat_template=template, add_generation_prompt=True)
    before, media, after = written.partition(vision_block(IMAGE) + vision_block(VIDEO) + _PROBE)
    if not media:
        raise ValueError(
            f"{reward}: the chat template of {base} does not write an image, a video and a text "
            f"like Qwen's: {written!r}"
        )
    return before, after


def templated(templates: Any, turns: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Write turns in the chat template of a tokenizer or processor. ValueError, with its name,
    whatever the template raises, and if it does not end."""
    try:
        return render_chat(templates, turns, **options)
    except (TemplateRefused, TemplateLate) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the chat template of {_name_of(templates)} cannot write a turn ({reason}): use a "
            "model with another template"
        ) from error


def _name_of(templates: Any) -> str:
    tokenizer = getattr(templates, "tokenizer", templates)  # of a processor
    return str(tokenizer.name_or_path)


def _processor_template(base: str) -> str | None:
    """The template in a processor's own file, which older releases have and their authors use."""
    from transformers.utils.hub import cached_file

    absent = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    file = cached_file(base, "chat_template.json", **absent)
    return json.loads(Path(file).read_text(encoding="utf-8"))["chat_template"] if file else None
