"""The process that renders chat templates: see `templates`."""

from collections.abc import Callable
from typing import Any

from channel import Channel, Gone

MOST_SAID = 1000  # letters of an error


def serve_templates(channel: Channel, render: Callable[..., Any]) -> None:
    """Render conversations as they are asked for, until the other side has gone. A template may
    raise anything."""
    while True:
        try:
            asked = channel.receive()
        except Gone:
            return
        try:
            texts, _ = render(
                [asked["messages"]], chat_template=asked["template"], **asked["further"]
            )
            channel.send({"text": texts[0]})
        except Exception as error:
            kind = "type" if isinstance(error, TypeError) else type(error).__name__
            channel.send({"raised": kind, "why": str(error)[:MOST_SAID]})
