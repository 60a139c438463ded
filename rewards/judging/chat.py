"""What a judge is told and how its answers are read: chat completions as OpenAI, vLLM and SGLang
give them.

Readers raise `Unparsable` for an answer without a verdict; they never guess.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError

from rewards.serving.codec import encode_image
from rewards.serving.requests import Malformed, Unparsable
from rewards.types import Kind

LEAST_MASS = 0.5  # of the probability that must lie on the answers asked for

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
    logprob: float


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
    """The part of a chat completion that is read here."""

    choices: list[ChatChoice] = Field(min_length=1)

    @property
    def text(self) -> str:
        """What was said after thinking. Unparsable where nothing was."""
        said = (self.choices[0].message.content or "").rpartition("</think>")[2].strip()
        if not said:
            raise Unparsable("an empty answer")
        return said


def completion(body: Any) -> Completion:
    try:
        return Completion.model_validate(body)
    except ValidationError as error:
        raise Malformed from error


def user(*parts: str | Mapping[str, Any]) -> list[dict[str, Any]]:
    """One message of the user from texts and pictures."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else dict(p) for p in parts]
    return [{"role": "user", "content": content}]


def fill(template: str, kind: Kind, prompt: str, question: str = "") -> str:
    """Braces of other kinds stay as they are: prompts may have some."""
    values = {
        "{media}": kind,
        "{Media}": kind.capitalize(),
        "{question}": question,
        "{prompt}": prompt,
    }
    return re.sub(r"\{(media|Media|question|prompt)\}", lambda m: values[m[0]], template)


def message_parts(item: Any, kind: Kind, frames: int) -> list[str | dict[str, Any]]:
    """A sample as parts of a message: a text, a picture, or `frames` pictures of a video."""
    if kind == "text":
        return [item]
    if kind == "image":
        return [_picture(item)]
    places = torch.linspace(0, len(item) - 1, min(frames, len(item))).round().long().tolist()
    return [_picture(item[place]) for place in places]


def _picture(pixels: torch.Tensor) -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{encode_image(pixels)}"},
    }


def score_in(answer: Completion) -> float:
    """The last `Score: N`, 1..5, as 0..1."""
    found = re.findall(r"score\W{0,8}(\d+(?:\.\d+)?)", answer.text, re.IGNORECASE)
    if not found or not 1 <= float(found[-1]) <= 5:
        raise Unparsable("no score from 1 to 5")
    return (float(found[-1]) - 1) / 4


def expected_in(answer: Completion) -> float:
    """The mean of the digits 1..5 under the model's own probabilities, as 0..1."""
    mass = probabilities(answer, "12345")
    if mass is None:
        raise Unparsable("no log-probabilities of the digits 1 to 5")
    return sum(i * p for i, p in enumerate(mass)) / 4


def yes_in(answer: Completion) -> float:
    """P(yes) by log-probabilities; by the word itself, 1 or 0, where the server gives none."""
    mass = probabilities(answer, ("yes", "no"))
    if mass is not None:
        return mass[0]
    word = re.match(r"\W*(yes|no)\b", answer.text, re.IGNORECASE)
    if word is None:
        raise Unparsable("neither yes nor no")
    return float(word[1].lower() == "yes")


def which_in(answer: Completion) -> float:
    """P(the first is better) by log-probabilities of 1 and 2."""
    mass = probabilities(answer, "12")
    if mass is None:
        raise Unparsable("no log-probabilities of 1 and 2")
    return mass[0]


def verdict_in(answer: Completion) -> float:
    """1 or 0 from `<answer>Image 1 is better</answer>`, 1/2 from a tie that is said in words.

    The form is that of UnifiedReward-Think (arXiv:2505.03318). An answer without the tag, or with
    both verdicts in it, is unparsable; the code of Pref-GRPO makes half a win of such.
    """
    tag = re.search(r"<answer>(.*?)</answer>", answer.text, re.IGNORECASE | re.DOTALL)
    if tag is None:
        raise Unparsable("no <answer>")
    said = " ".join(tag[1].lower().split()).strip(" .")
    named = set(re.findall(r"(?:image|video|text) ([12]) is better", said))
    if bare := re.fullmatch(r"(?:(?:image|video|text) )?([12])", said):
        named = {bare[1]}
    if named in ({"1"}, {"2"}):
        return float(named == {"1"})
    if not named and re.fullmatch(r"(?:it is )?(?:a )?(?:tie|draw)|(?:both are )?equal", said):
        return 0.5
    raise Unparsable("no verdict in <answer>")


def questions_in(answer: Completion) -> list[str]:
    """The lines that end with a question mark, without their numbers."""
    lines = [re.sub(r"^[\s\-*\d.)]+", "", line).strip() for line in answer.text.splitlines()]
    found = [line for line in lines if line.endswith("?")]
    if not found:
        raise Unparsable("no questions")
    return found


def probabilities(answer: Completion, options: Sequence[str]) -> list[float] | None:
    """The probability of each option where the last of them was said; their sum is made 1.

    None where the server gave no log-probabilities, no option was said, or most of the mass was
    elsewhere. Tokens that differ in capitals and spaces are one option.
    """
    given = answer.choices[0].logprobs
    positions = (given.content if given is not None else None) or []
    for position in reversed(positions):
        if position.token.strip().lower() not in options:
            continue
        mass = dict.fromkeys(options, 0.0)
        for token in position.top_logprobs or [position]:
            word = token.token.strip().lower()
            if word in mass:
                mass[word] += math.exp(token.logprob)
        total = sum(mass.values())
        return [mass[o] / total for o in options] if total >= LEAST_MASS else None
    return None
