"""Soft-TIFA, the score of GenEval 2 (arXiv:2512.16853): probabilities of the right answers.

The column `vqa_list` has a prompt's questions with their answers, `[["How many cats ...?",
"two"], ...]`. Each question is asked about the image, followed by ` Answer in one word.`. The
score of an answer is the summed probability of the first tokens of its forms: for a number the
word, the capitalised word, both after a blank, the digit, and the digit after a blank; for all
other answers Yes, yes, ` yes` and ` Yes`. `kind: arithmetic` is the mean over the questions (AM),
`geometric` the geometric mean (GM), 0 if one of them is 0. GenEval 2 reports 100 times the mean
over prompts.

As in the published code, two oddities are kept: in Qwen's vocabulary the first token of ` 2` is a
blank, so the blank counts for every number; and forms with the same first token count twice, so a
score may exceed 1. A question that begins with `How many` asks for a number. Tested only with a
fake server's answers, not with the published judge.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.judging import chat
from rewards.judging.panel import SHORT_ANSWER, Messages, Panel, PanelSettings
from rewards.judging.token_mass import first_token_mass
from rewards.perception.hub import HubName, model_path
from rewards.perception.media import expect, items
from rewards.types import Inline, Kind, NeededColumn, Reward, Samples, cell

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

ONE_WORD = " Answer in one word."
YES = ("Yes", "yes", " yes", " Yes")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def forms_of(question: str, answer: str) -> tuple[str, ...]:
    """The forms of the right answer, in the authors' order."""
    if not question.startswith("How many"):
        return YES
    word = answer.strip()
    forms = (word, word.capitalize(), f" {word}", f" {word.capitalize()}")
    if word.lower() in NUMBERS:
        digit = str(NUMBERS.index(word.lower()))
        return (*forms, digit, f" {digit}")
    return forms


@dataclass(frozen=True)
class SoftTifa:
    """Mean over a prompt's questions; unscored unless all of them were answered."""

    panel: Panel
    tokenizer: Any
    geometric: bool
    column: str
    one_call: ClassVar[bool] = True
    waits: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        kind = expect(samples, "soft_tifa", "image", "video")
        rows: list[int] = []
        about: list[Messages] = []
        forms: list[tuple[str, ...]] = []
        for row, item in enumerate(items(samples)):
            shown = chat.message_parts(item, kind, self.panel.frames)
            for question, right in _questions(samples, row, self.column):
                rows.append(row)
                about.append(chat.user(*shown, question + ONE_WORD))
                forms.append(tuple(self._first_token(form) for form in forms_of(question, right)))
        mass, at = self._mass(about, forms), torch.tensor(rows, dtype=torch.long)
        scores = torch.full((len(samples.prompts),), torch.nan, dtype=torch.float64)
        for row in set(rows):
            of_row = mass[at == row]
            scores[row] = of_row.log().mean().exp() if self.geometric else of_row.mean()
        return scores

    def _mass(self, about: list[Messages], forms: list[tuple[str, ...]]) -> Float[Tensor, " q"]:
        """The probability of each question's forms; questions with equal forms share a call."""
        masses = torch.full((len(about),), torch.nan, dtype=torch.float64)
        for form in dict.fromkeys(forms):
            where = [index for index, other in enumerate(forms) if other == form]
            read = partial(first_token_mass, forms=form)
            masses[where] = self.panel.values([about[p] for p in where], read, SHORT_ANSWER)
        return masses

    def _first_token(self, form: str) -> str:
        ids = self.tokenizer(form, add_special_tokens=False)["input_ids"]
        return self.tokenizer.decode(ids[:1])

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError, naming the row, for a prompt without questions."""
        whole = Samples([""] * len(prompts), prompts, torch.zeros(len(prompts)).long(), meta)
        for row in range(len(prompts)):
            if not _questions(whole, row, self.column):
                raise ValueError(
                    f"soft_tifa: row {row + 1} of the prompts has no questions in its column "
                    f"{self.column!r}: a list of pairs [question, answer], as in "
                    "geneval2_data.jsonl"
                )


def _questions(samples: Samples, row: int, column: str) -> list[tuple[str, str]]:
    value = cell(samples.meta[row], column) if samples.meta else None
    pairs = value if isinstance(value, list) else []
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            f"soft_tifa: row {row + 1}: {column} must be pairs [question, answer], not {value!r}"
        )
    return [(str(question), str(answer)) for question, answer in pairs]


def load(
    server: Inline[PanelSettings],
    kind: Literal["arithmetic", "geometric"] = "geometric",
    tokenizer: HubName = "Qwen/Qwen3-VL-8B-Instruct",
    column: NeededColumn = "vqa_list",
) -> Reward:
    """Load the reward.

    kind       mean over a prompt's questions: geometric, 0 if one of them is 0, or arithmetic
    tokenizer  tokenizer of the served model, for the first tokens of answers: a folder or a name on
               the hub
    column     column of the prompt file with the questions and answers, [[question, answer], ...]
    """
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(model_path(tokenizer))
    return SoftTifa(server.open(), words, kind == "geometric", column)
