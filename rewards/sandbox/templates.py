"""Chat templates of model folders, rendered in a confined process.

A template is a program of the model's authors. transformers' own environment keeps it from Python's
insides, but not from endless loops or from filling the memory. So one process per run renders all
templates, with the protections of `confine`, each in bounded time; one that takes longer is ended.
"""

import atexit
import json
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from rewards.sandbox.channel import MAX_MESSAGE, Channel, Gone
from rewards.sandbox.run import SandboxLimits, SandboxProcess, make_folder, read_control, started

RENDER_SECONDS = 10.0  # for one conversation; usual ones take a thousandth of a second
TEMPLATE_LIMITS = SandboxLimits(
    seconds=10**7, memory=2**30, processes=8
)  # of the process, for a whole run
IMPORT_SECONDS = 120.0  # the import of transformers on a busy machine


class TemplateLate(ValueError):
    """A template did not end in time."""


class TemplateRefused(ValueError):
    """A template raised an error: it cannot write these messages."""


def render_chat(templates: Any, messages: Sequence[Mapping[str, Any]], **further: Any) -> str:
    """Write messages with the chat template of a tokenizer or processor, as its own
    `apply_chat_template(messages, tokenize=False, **further)` does.

    TemplateRefused for an error of the template, TemplateLate if it takes longer than
    RENDER_SECONDS.
    """
    variables = dict(further)
    template = variables.pop("chat_template", None) or _own_template(
        templates, variables.get("tools")
    )
    tokenizer = getattr(templates, "tokenizer", templates)  # of a processor
    asked = {
        "template": template,
        "messages": [_message(message) for message in messages],
        "further": {**tokenizer.special_tokens_map, **variables},
    }
    return _renderer.render(json.loads(json.dumps(asked, default=_placeholder)))


def _own_template(templates: Any, tools: Any) -> str:
    """The template of a tokenizer or processor, which may have several by name."""
    template = templates.chat_template
    if isinstance(template, Mapping):
        template = (
            template.get("tool_use")
            if tools and "tool_use" in template
            else template.get("default")
        )
    if not isinstance(template, str):
        raise TemplateRefused("it has no chat template, or several without a default one")
    return template


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without empty entries, and with images in the form of templates."""
    fields = {name: value for name, value in message.items() if value is not None}
    if isinstance(fields.get("content"), list):
        fields["content"] = [
            {"type": "image", "url": ""}
            if isinstance(part, Mapping) and part.get("type") == "image_url"
            else part
            for part in fields["content"]
        ]
    return fields


def _placeholder(value: Any) -> str:
    """Write a value that is no plain data as transformers does, which a template then sees."""
    return f"<{type(value).__name__}>"


class _Renderer:
    """The process, started at the first template, and again in a fork or once it was ended."""

    def __init__(self) -> None:
        self.lock, self.stack, self.owner = threading.Lock(), ExitStack(), os.getpid()
        self.channel: Channel | None = None
        self.process: SandboxProcess | None = None

    def render(self, asked: dict[str, Any]) -> str:
        with self.lock:
            if self.owner != os.getpid():  # a fork has its own; the other is the parent's
                self.stack, self.channel, self.owner = ExitStack(), None, os.getpid()
            if self.channel is None:
                self._start()
            answer = self._answer(asked)
        if "text" in answer:
            return answer["text"]
        reason = str(answer["why"])
        if "no loader for this environment" in reason:
            reason = "it includes or imports another template, and models have one file alone"
        raise TemplateRefused(reason or answer["raised"])

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self.channel is not None and self.process is not None
        late = threading.Event()
        timer = threading.Timer(RENDER_SECONDS, self._end_late, (late, self.process))
        timer.daemon = True
        timer.start()
        try:
            self.channel.send(asked)
            answer = self.channel.receive()
            if not isinstance(answer, dict) or not {"text", "raised"} & answer.keys():
                raise Gone
        except (Gone, ValueError) as error:
            self.close()
            if late.is_set():
                raise TemplateLate(
                    f"the chat template did not end within {RENDER_SECONDS:g} s and was stopped"
                ) from error
            raise TemplateRefused(
                f"the chat template ended its process (more than {TEMPLATE_LIMITS.memory >> 20} MB "
                f"of memory, or {MAX_MESSAGE >> 20} MB of text)"
            ) from error
        finally:
            timer.cancel()
        return answer

    @staticmethod
    def _end_late(late: threading.Event, process: SandboxProcess) -> None:
        late.set()
        process.end()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self.stack.enter_context(ours)
        with theirs:
            folder = self.stack.enter_context(make_folder(""))
            null = subprocess.DEVNULL
            begun = started("templates", folder, TEMPLATE_LIMITS, null, null, theirs)
            self.process = self.stack.enter_context(begun)
        read_control(self.process.reports, None, IMPORT_SECONDS)
        self.channel = Channel(ours.fileno())

    def close(self) -> None:
        """End the process, if it is this process's own."""
        if self.owner == os.getpid():
            self.channel = None
            self.stack.close()


_renderer = _Renderer()
atexit.register(_renderer.close)
