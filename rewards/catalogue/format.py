r"""1 if the whole text has the requested form, otherwise 0. No weights.

think_answer   <think>...</think> then <answer>...</answer>, each once, nothing around them
boxed          one \boxed{...} somewhere
number         a number and nothing else
json           a JSON document
pattern        the given regular expression, which must match the whole text
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.answers.boxes import boxes
from rewards.perception.media import expect
from rewards.types import Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("text",)

FormatKind = Literal["think_answer", "boxed", "number", "json", "pattern"]
GOOD = {
    "think_answer": "<think>three and four</think>\n<answer>7</answer>",
    "boxed": r"It is \boxed{7}.",
    "number": "-7.5",
    "json": '{"sum": 7}',
}
BAD = "It is {seven"  # has none of the forms


def is_think_answer(text: str) -> bool:
    once = all(text.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    form = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"
    return once and re.fullmatch(form, text, re.DOTALL) is not None


def is_boxed(text: str) -> bool:
    return len(list(boxes(text))) == 1


def is_number(text: str) -> bool:
    return re.fullmatch(r"\s*[-+]?\d[\d,]*(\.\d+)?\s*", text) is not None


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


NAMED = {
    "think_answer": is_think_answer,
    "boxed": is_boxed,
    "number": is_number,
    "json": is_json,
}


@dataclass(frozen=True)
class Format:
    kind: str
    fits: Callable[[str], bool]

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "format", "text")
        return torch.tensor([float(self.fits(text)) for text in samples.media])

    def examples(self) -> Samples | None:
        """A text in the required form and one that is not; None for a pattern from the user."""
        if self.kind not in GOOD:
            return None
        return Samples([GOOD[self.kind], BAD], ["3 + 4"] * 2, torch.zeros(2, dtype=torch.long))


def load(kind: FormatKind = "think_answer", pattern: str | None = None) -> Reward:
    """Load the reward.

    kind     form that the whole text must have, as above
    pattern  regular expression that must match the whole text, dots also line ends; for `kind:
             pattern` alone
    """
    if (kind == "pattern") != (pattern is not None):
        raise ValueError(
            "format: `pattern` and `kind: pattern` belong together: give both or neither"
        )
    if pattern is None:
        return Format(kind, NAMED[kind])
    try:
        form = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"format: {pattern!r} is not a valid pattern: {error}") from error
    return Format(kind, lambda text: form.fullmatch(text) is not None)
