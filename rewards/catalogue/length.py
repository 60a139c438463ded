"""Length of a text in characters, words or tokens. With l the length:

overlong   DAPO's soft penalty (arXiv:2503.14476, equation 13): 0 up to most - soft, then falling
           linearly to -1 at `most`, and -1 beyond
near       max(0, 1 - |l - target| / target): 1 at the target, 0 at length 0 and twice the target
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from rewards.perception.hub import HubName, model_path
from rewards.perception.media import expect
from rewards.types import Kind, OneOrMore, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("text",)

Unit = Literal["characters", "words", "tokens"]


@dataclass(frozen=True)
class Length:
    """Scores texts by length. `most` and `soft` are in units of text; for `near`, `most` is the
    target."""

    kind: Literal["overlong", "near"]
    measure: Callable[[str], int]
    most: int
    soft: int

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "length", "text")
        lengths = torch.tensor([float(self.measure(t)) for t in samples.media]).double()
        if self.kind == "near":
            return (1 - (lengths - self.most).abs() / self.most).clamp(min=0)
        beyond = lengths - (self.most - self.soft)
        if self.soft == 0:
            return -(beyond > 0).double()
        return -(beyond / self.soft).clamp(0, 1)

    def examples(self) -> Samples:
        """A text of the right length (or a short enough one), and one three times as long as
        allowed."""
        good = "one " * (self.most if self.kind == "near" else 0)
        texts = [good, "one " * (3 * self.most + 1)]
        if self.kind == "near" and self.measure is len:
            texts = [text[: len(text) // 4] for text in texts]
        return Samples(texts, ["a prompt"] * 2, torch.zeros(2, dtype=torch.long))


def words(text: str) -> int:
    return len(text.split())


def tokens(tokenizer: str) -> Callable[[str], int]:
    """Return a function that counts a text's tokens, without special tokens."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(model_path(tokenizer))
    return lambda text: len(encode(text, add_special_tokens=False)["input_ids"])


def load(
    most: OneOrMore,
    soft: Annotated[int, Field(ge=0)] = 0,
    kind: Literal["overlong", "near"] = "overlong",
    unit: Unit = "words",
    tokenizer: HubName | None = None,
) -> Reward:
    """Load the reward.

    most       length in units of `unit`, at least 1: with overlong longer texts have the whole
               penalty, -1; with near it is the target
    soft       length of the slope up to `most`, at least 0 and at most `most`: the penalty begins
               at most - soft; no effect with near
    kind       overlong: a penalty of long texts, 0 to -1; near: 1 at the target, 0 at twice the
               target
    unit       what is counted
    tokenizer  tokenizer that counts: a folder or a name on the hub; for `unit: tokens` alone
    """
    if soft > most:
        raise ValueError(f"length: soft must be at most `most`, {most}, not {soft}")
    if (unit == "tokens") != (tokenizer is not None):
        raise ValueError(
            "length: `tokenizer` and `unit: tokens` belong together: give both or neither"
        )
    if tokenizer is not None:
        return Length(kind, tokens(tokenizer), most, soft)
    return Length(kind, len if unit == "characters" else words, most, soft)
