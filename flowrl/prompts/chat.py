"""Prompts that are lists of chat messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.errors import UserError

ChatMessage = Mapping[str, Any]  # role and content; what else a chat template may read


class Chat(str):
    """A prompt of chat messages. A language model's chat template renders `messages`.

    Everything else reads it as a text: the user's message, or all messages but the system's with
    their roles if there are several. `at` names its file and row in errors.
    """

    messages: tuple[ChatMessage, ...]
    at: str

    def __new__(cls, text: str, messages: Sequence[ChatMessage] = (), at: str = "") -> "Chat":
        chat = super().__new__(cls, text)
        chat.messages, chat.at = tuple(messages), at
        return chat


def read_chat(value: Sequence[Any], at: str, drop_reply: bool) -> Chat:
    """Read a prompt from a list of messages. The next turn after the last message must be the
    model's.

    `drop_reply` leaves out an assistant's message at the end. UserErrors begin with `at`.
    """
    messages = [_message(one, f"{at}: message {i}") for i, one in enumerate(value, 1)]
    if drop_reply and messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise UserError(f"{at}: the prompt has no messages")
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{at}: the chat ends with an assistant message, which the model should write: set "
            "drop_reply: true for this data set, or name another column"
        )
    shown = [message for message in messages if message["role"] != "system"]
    if not shown:
        raise UserError(f"{at}: the chat only has a system message; add a user message")
    lines = [f"{message['role']}: {message['content']}" for message in shown]
    return Chat(shown[0]["content"] if len(shown) == 1 else "\n".join(lines), messages, at)


def _message(value: Any, at: str) -> ChatMessage:
    """A message without its empty keys, and its content as one text."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        have = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"{value!r:.50}"
        raise UserError(f"{at} has {have}; a message must be {{role: user, content: a text}}")
    content = value.get("content")
    if isinstance(content, list):
        content = _joined(content, at)
    if content is None and value.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise UserError(f"{at}: its content is {content!r:.50}, not a text")
    rest = {key: each for key, each in value.items() if each is not None}
    return {**rest, "content": content}


def _joined(parts: Sequence[Any], at: str) -> str:
    """The text of content in parts, `{type: text, text: ...}`."""
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    for part, text in zip(parts, texts, strict=True):
        if isinstance(text, str):
            continue
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise UserError(
            f"{at} has a part of type {kind!r:.50}, but only texts are supported: "
            "leave such rows out (where), or name another column"
        )
    return "".join(str(text) for text in texts)
