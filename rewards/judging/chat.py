"""Requests to a judge and its raw answers: chat completions of OpenAI, vLLM, SGLang."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError

from rewards.serving.codec import encode_image, encode_jpeg
from rewards.serving.requests import Malformed, Unparsable
from rewards.types import Kind

SCORE = (
    "You are shown a {media} that was made for this request:\n{prompt}\n\n"
    "Judge how well it fulfils the request and how well it is made, from 1 (not at all) to 5 "
    "(nothing could be better). Give your reasons in a few sentences. Then end with a line "
    "`Score: N`, where N is a number from 1 to 5."
)
EXPECTED = (
    "You are shown a {media} that was made for this request:\n{prompt}\n\n"
    "How well does it fulfil the request, from 1 (not at all) to 5 (nothing could be better)? "
    "Answer with one digit and nothing else."
)
YES_NO = (
    "You are shown a {media}. Does it show exactly what this request asks for?\n{prompt}\n\n"
    "Answer yes or no and nothing else."
)
VERDICT = (
    "You are shown two {media}s that were made for this request:\n{prompt}\n\n"
    "Compare them: which fulfils the request better and is made better? Think it over step by step "
    "inside <think> and </think>. Then give the verdict inside <answer> and </answer>, as exactly "
    "`{Media} 1 is better` or `{Media} 2 is better`."
)
WHICH = (
    "You are shown two {media}s that were made for this request:\n{prompt}\n\n"
    "Which one fulfils the request better and is made better? Answer 1 or 2 and nothing else."
)
QUESTIONS = (
    "Somebody asked for a {media} with these words:\n{prompt}\n\n"
    "Break the request into questions that can be answered by yes or no from the {media} alone: "
    "one for each object, number, colour, property, action and relation that it names. Yes must "
    "mean that the request is met. Write one question a line and nothing else."
)
ASPECT = "Look at this {media}. {question}\nAnswer yes or no and nothing else."


class TokenChance(BaseModel):
    token: str
    logprob: Annotated[float, Field(strict=True)]


class TokenPosition(TokenChance):
    top_logprobs: list[TokenChance] = Field(default_factory=list)


class ChatLogprobs(BaseModel):
    content: list[TokenPosition] | None = None


class Message(BaseModel):
    content: str | None = None


class ChatChoice(BaseModel):
    message: Message
    logprobs: ChatLogprobs | None = None


class Completion(BaseModel):
    """The fields of a chat completion that the readers need."""

    choices: list[ChatChoice] = Field(min_length=1)

    @property
    def text(self) -> str:
        """The text after the reasoning. Raises Unparsable if it is empty or the reasoning does not
        end."""
        text = (self.choices[0].message.content or "").rpartition("</think>")[2].strip()
        if not text:
            raise Unparsable("an empty answer")
        if "<think>" in text:
            raise Unparsable("the answer ends inside <think>")
        return text


def completion(body: Any) -> Completion:
    """Parse the body of a response. Raises Malformed for another format."""
    try:
        return Completion.model_validate(body)
    except ValidationError as error:
        raise Malformed from error


def user(*parts: str | Mapping[str, Any]) -> list[dict[str, Any]]:
    """A user message of texts and images."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else dict(p) for p in parts]
    return [{"role": "user", "content": content}]


def fill(template: str, kind: Kind, prompt: str, question: str = "") -> str:
    """Fill in the known fields; other braces, which prompts may contain, stay unchanged."""
    values = {
        "{media}": kind,
        "{Media}": kind.capitalize(),
        "{question}": question,
        "{prompt}": prompt,
    }
    return re.sub(r"\{(media|Media|question|prompt)\}", lambda m: values[m[0]], template)


def message_parts(
    item: Any, kind: Kind, frames: int, jpeg: int | None = None
) -> list[str | dict[str, Any]]:
    """A sample as message parts: a text, an image, or `frames` images of a video.

    jpeg: quality of JPEG files instead of PNG.
    """
    if kind == "text":
        return [item]
    if kind == "image":
        return [image_part(item, jpeg)]
    indices = torch.linspace(0, len(item) - 1, min(frames, len(item))).round().long().tolist()
    return [image_part(item[index], jpeg) for index in indices]


def image_part(pixels: torch.Tensor, jpeg: int | None = None) -> dict[str, Any]:
    """An image as a message part: PNG, or JPEG of this quality."""
    if jpeg is None:
        kind, data = "png", encode_image(pixels)
    else:
        kind, data = "jpeg", encode_jpeg(pixels, jpeg)
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}
