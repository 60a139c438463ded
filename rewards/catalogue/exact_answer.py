"""1 if the answer in a text equals the answer in the prompt file, otherwise 0. No weights.

`find` locates the answer, `kind` compares it with `column` of the prompt file. A sample whose
prompt has no answer in that column is unscored.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.answers.boxes import last_box
from rewards.checks.winnable import Winnable
from rewards.perception.media import expect
from rewards.types import Kind, NeededColumn, Reward, Samples, cell

SCORED_KINDS: tuple[Kind, ...] = ("text",)

_NUMBER = r"(?:(?<!\w)[-+])?\d(?:[\d,]*\d)?(?:\.\d+)?(?:/\d+)?"
ANSWER_FORMS = {"boxed": r"\boxed{{{}}}", "tag": "<answer>{}</answer>", "hash": "#### {}"}
FIND = {  # the last match counts: models restate their answers
    "all": r"(?s)\A\s*(.*?)\s*\Z",
    "last_number": rf"({_NUMBER})",
    "last_line": r"(?m)^\s*(\S.*?)\s*$",
    "boxed": r"(\\boxed)",  # its braces are matched in code
    "tag": r"(?s)<answer>\s*((?:(?!<answer>).)*?)\s*</answer>",
    "hash": r"####\s*(\S.*?)\s*(?:$|\n)",
}


def last_match(text: str, pattern: re.Pattern[str]) -> str | None:
    """The last match of the pattern's first group, or the content of the last box; None without a
    match."""
    if pattern.pattern == FIND["boxed"]:
        return last_box(text)
    last = None
    for match in pattern.finditer(text):
        last = match[1]
    return last


def exact_number(text: str) -> Fraction | None:
    """The exact value of "1,000", "-0.5", "$3", "3/4" or "50%"; None for anything else."""
    bare = text.strip().lstrip("$").replace(",", "")
    percent, bare = bare.endswith("%"), bare.rstrip("%").strip()
    above, slash, below = bare.partition("/")
    try:
        value = Fraction(Decimal(above))
        if slash:
            value /= Fraction(Decimal(below))
    except (InvalidOperation, ValueError, OverflowError, ZeroDivisionError):
        return None
    return value / 100 if percent else value


def canonical(answer: str, kind: str) -> Hashable:
    """A canonical form that is equal for equal answers."""
    number = exact_number(answer) if kind == "number" else None
    if number is not None:
        return number
    return answer.strip() if kind == "exact" else tuple(answer.casefold().split())


def same(answer: str, truth: str, kind: str) -> bool:
    return canonical(answer, kind) == canonical(truth, kind)


@dataclass(frozen=True)
class ExactAnswer:
    kind: Literal["number", "text", "exact"]
    pattern: re.Pattern[str]
    column: str

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "exact_answer", "text")
        if not samples.meta:
            raise ValueError(
                f"exact_answer: the prompts have no columns; add a column {self.column!r} to "
                "the prompt file, or name another with `column`"
            )
        scores = [self._score(t, m) for t, m in zip(samples.media, samples.meta, strict=True)]
        return torch.tensor(scores, dtype=torch.float64)

    def _score(self, text: str, meta: Mapping[str, Any]) -> float:
        truth = cell(meta, self.column)
        if truth is None:
            return torch.nan
        answer = last_match(text, self.pattern)
        return float(answer is not None and same(answer, str(truth), self.kind))

    def winnable(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> list[Winnable]:
        """Whether a text with each row's answer, where `find` looks for it, would win; unknown for
        a pattern from the user."""
        return [self._winnable(row) for row in meta]

    def _winnable(self, row: Mapping[str, Any]) -> Winnable:
        truth, form = cell(row, self.column), self._form
        if truth is None or form is None:
            return Winnable("unknown")
        right = str(truth)
        subject = f"its {self.column} {right[:60]!r}"
        if not right.strip():
            return Winnable("no", f"{subject} is empty")
        if self._score(form.format(right), row) == 1:
            return Winnable("yes")
        where = next(name for name, text in FIND.items() if text == self.pattern.pattern)
        more = "; math_answer takes the part after ####" if "####" in right else ""
        return Winnable("no", f"{subject} is never what `find: {where}` finds in a text{more}")

    @property
    def _form(self) -> str | None:
        """A text that has an answer where `find` looks for it."""
        name = next((name for name, text in FIND.items() if text == self.pattern.pattern), None)
        return None if name is None else ANSWER_FORMS.get(name, "{}")

    def answers(self, samples: Samples) -> list[Hashable | None]:
        """The answer of each text in canonical form; None if the pattern finds none."""
        matches = [last_match(text, self.pattern) for text in samples.media]
        return [None if a is None else canonical(a, self.kind) for a in matches]

    def examples(self) -> Samples | None:
        """The right answer and a wrong one; None for a pattern from the user."""
        form = self._form
        if form is None:
            return None
        texts, meta = [form.format(7), form.format(8)], [{self.column: "7"}] * 2
        return Samples(texts, ["3 + 4"] * 2, torch.zeros(2, dtype=torch.long), meta)


def load(
    kind: Literal["number", "text", "exact"] = "number",
    find: str = "all",
    column: NeededColumn = "answer",
) -> Reward:
    """kind    number: equal as exact numbers where both are numbers, otherwise as `text`; text:
            equal except for case and whitespace; exact: equal
    find    where in the text the answer is: all, last_number, last_line, boxed (TeX), tag
            (<answer>), hash (####), or a regular expression whose first group is the answer; the
            last match counts
    column  column of the prompt file with the right answer
    """
    try:
        pattern = re.compile(FIND.get(find, find))
    except re.error as error:
        raise ValueError(f"exact_answer: find: {find!r} is not a valid pattern: {error}") from error
    if pattern.groups < 1:
        raise ValueError(
            f"exact_answer: find must be one of {', '.join(FIND)} or a regular expression with "
            f"a group in parentheses, not {find!r}"
        )
    return ExactAnswer(kind, pattern, column)
