"""Prompts that are lists of chat messages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flowrl.errors import UserError
from flowrl.prompts.source import of_given, way_without_row

ChatMessage = Mapping[str, Any]  # role and content; what else a chat template may read
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}  # of ShareGPT's form, as FastChat and LLaMA-Factory read it (its data/README.md)


class Chat(str):
    """A prompt of chat messages. A language model's chat template renders `messages`. A message's
    content is a text, or a list of parts, `{type: text, text: ...}` and `{type: image}`, if it has
    images.

    Everything else reads it as a text: the user's message, or, if there are several, all messages
    except the system's, with their roles. `at` names its file and row in errors.
    """

    messages: tuple[ChatMessage, ...]
    at: str

    def __new__(cls, text: str, messages: Sequence[ChatMessage] = (), at: str = "") -> "Chat":
        chat = super().__new__(cls, text)
        chat.messages, chat.at = tuple(messages), at
        return chat


def read_chat(
    value: Sequence[Any], at: str, drop_reply: bool, located: Callable[[Any], Any]
) -> Chat:
    """Read a prompt from a list of messages. The next turn after the last message must be the
    model's.

    `drop_reply` leaves out an assistant's message at the end; `located` makes an image's path
    absolute. UserErrors begin with `at`.
    """
    messages = [_message(one, f"{at}: message {i}", located) for i, one in enumerate(value, 1)]
    if drop_reply and messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UserError(f"{at}: the prompt has no messages")
    if messages[-1]["role"] == "assistant":
        if of_given(at):
            raise UserError(
                f"{at}: the chat ends with an assistant message, which is a sample and not the "
                "prompt: choose another column (given.column); rows of messages alone need none"
            )
        raise UserError(
            f"{at}: the chat ends with an assistant message, which the model should write: set "
            "drop_reply: true for this data set, or choose another column"
        )
    shown = [message for message in messages if message["role"] != "system"]
    if not shown:
        raise UserError(f"{at}: the chat only has a system message; add a user message")
    texts = [text_of(message["content"]) for message in shown]
    lines = [f"{message['role']}: {text}" for message, text in zip(shown, texts, strict=True)]
    return Chat(texts[0] if len(shown) == 1 else "\n".join(lines), messages, at)


def of_sharegpt(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of ShareGPT's form, `{from: human, value: a text}`, with role and content in their
    place; any other message unchanged, and one of an unknown speaker."""
    if "role" in value or "content" in value or value.get("from") not in _SPEAKERS:
        return value
    rest = {key: field for key, field in value.items() if key not in ("from", "value")}
    return {**rest, "role": _SPEAKERS[value["from"]], "content": value.get("value")}


def message_of(value: Any) -> ChatMessage | None:
    """A message with role and content in their place, whichever form it has; None for anything
    else."""
    if not isinstance(value, Mapping):
        return None
    message = of_sharegpt(value)
    return message if isinstance(message.get("role"), str) else None


def with_system(messages: Sequence[Any], system: Any) -> Sequence[Any]:
    """The messages behind a system message, unless there is none or they begin with one."""
    first = message_of(messages[0]) if messages else None
    if not isinstance(system, str) or not system or (first or {}).get("role") == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a message's content, without its images."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)


def has_images(prompt: str) -> bool:
    """Whether a prompt is a chat with images among its messages."""
    messages = prompt.messages if isinstance(prompt, Chat) else ()
    return any(not isinstance(message["content"], str) for message in messages)


def _message(value: Any, at: str, located: Callable[[Any], Any]) -> ChatMessage:
    """A message without its empty keys. Its content is one text, or parts if it has images."""
    if isinstance(value, Mapping):
        value = of_sharegpt(value)
        if "role" not in value and "from" in value:
            raise UserError(
                f"{at} is from {value['from']!r:.50}, and only {', '.join(_SPEAKERS)} are known: "
                f"{way_without_row(at)}, or choose another column"
            )
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        have = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"{value!r:.50}"
        raise UserError(f"{at} has {have}; a message must be {{role: user, content: a text}}")
    content = value.get("content")
    if isinstance(content, list):
        parts = [_part(part, at, located) for part in content]
        pictured = any(part["type"] == "image" for part in parts)
        content = parts if pictured else text_of(parts)
    if content is None and value.get("tool_calls"):
        content = ""
    if not isinstance(content, str | list):
        raise UserError(f"{at}: its content is {content!r:.50}, not a text")
    rest = {key: field for key, field in value.items() if field is not None}
    return {**rest, "content": content}


def _part(part: Any, at: str, located: Callable[[Any], Any]) -> dict[str, Any]:
    """A part of a message's content: a text, or an image with or without its file."""
    text = part.get("text") if isinstance(part, Mapping) else part
    if isinstance(text, str):
        return {"type": "text", "text": text}
    kind = part.get("type") if isinstance(part, Mapping) else part
    if kind == "image":
        file = next((part[k] for k in ("image", "path", "url") if part.get(k) is not None), None)
        return {"type": "image"} if file is None else {"type": "image", "image": located(file)}
    raise UserError(
        f"{at} has a part of type {kind!r:.50}, but only texts and images are supported: "
        f"{way_without_row(at)}, or choose another column"
    )
