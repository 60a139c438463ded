"""1 if the answer in a text is mathematically equal to the right answer, otherwise 0.

The answer is the content of the last box; with `find: any`, in a text without a box, that of the
last `<answer>` tag, without one of the last line `#### 72`, without one the last formula ($...$,
$$...$$, \\(...\\), \\[...\\]), and without one the last number. The package math-verify parses and
compares: 0.5, 1/2 and a TeX fraction are equal, as are sets, intervals, matrices and expressions
that simplify to each other; numbers must also agree for their size, to half a percent where one is
rounded. 3 1/2 is a mixed number, 12 million a number, x < 3 the interval below 3; 5 cm is 5, but
not 5 m. Answers with the same text are equal too, which is what counts where a right answer is no
mathematics: 12:00, Evelyn; where it is the letter of a choice, `E: a whale` is E. A completion
without an answer scores 0, as does a comparison that takes longer than `seconds`. A sample whose
right answer cannot be matched by any text, or is not read in time, is unscored, with a warning.
Worker processes do the work and are killed when they are late; no signals are used, so any thread
may call the reward.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.answers.boxes import (
    answer_text,
    has_content,
    last_answer,
    other_base,
    other_unit,
    right_answer,
    same_choice,
    same_text,
    simplified,
)
from rewards.checks.winnable import Winnable
from rewards.perception.media import expect
from rewards.perception.packages import needs_math_verify
from rewards.serving.workers import Workers
from rewards.types import Kind, NeededColumn, OneOrMore, Positive, Reward, Samples, cell

SCORED_KINDS: tuple[Kind, ...] = ("text",)

READING = 60.0  # seconds to read one right answer: a busy machine must not end a run


@dataclass(frozen=True)
class MathAnswer:
    workers: Workers
    find: Literal["any", "boxed"]
    column: str
    readable: set[str] = field(default_factory=set)  # right answers that were read in time
    counts: dict[str, int] = field(default_factory=lambda: {"unreadable": 0})

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "math_answer", "text")
        golds = self._golds(samples.prompts, samples.meta)
        lost = self._lost(golds)
        scores = torch.full((len(golds),), torch.nan, dtype=torch.float64)
        for row, gold in enumerate(golds):
            if gold in lost:
                self.counts["unreadable"] += 1
                warnings.warn(f"{self._place(row, samples.prompts, gold)} {lost[gold]}; the sample "
                              "is unscored", stacklevel=2)  # fmt: skip
        rows = [row for row, gold in enumerate(golds) if gold is not None and gold not in lost]
        pairs = [(str(golds[row]), samples.media[row]) for row in rows]
        right = self._compared(list(dict.fromkeys(pairs)))
        for row, pair in zip(rows, pairs, strict=True):
            scores[row] = float(right[pair])
        return scores

    def _compared(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], bool]:
        """Whether the answer of each text is the right answer."""
        equal: dict[tuple[str, str], bool] = {}
        asked: list[tuple[tuple[str, str], dict[str, str]]] = []
        for gold, text in pairs:
            answer = last_answer(text, self.find == "boxed")
            right = right_answer(gold)
            equal[gold, text] = answer is not None and (
                same_text(answer, right) or same_choice(answer, right)
            )
            another = answer is not None and (
                other_base(answer, right) or other_unit(answer, right)
            )
            if answer is not None and not equal[gold, text] and not another:
                asked.append(
                    ((gold, text), {"gold": simplified(right), "text": simplified(answer)})
                )
        verdicts = self.workers.ask([question for _, question in asked])
        return equal | {
            pair: verdict is True for (pair, _), verdict in zip(asked, verdicts, strict=True)
        }

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError if no row has an answer. Which answers no text can match: `winnable`."""
        if not any(cell(row, self.column) is not None for row in meta):
            raise ValueError(
                f"math_answer: no prompt has a column {self.column!r}; add it to the prompt "
                "file, or name another with `column`"
            )

    def winnable(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> list[Winnable]:
        """Whether each row's answer can be matched by a completion that has it."""
        golds = self._golds(prompts, meta)
        lost = self._lost(golds)
        return [
            Winnable("unknown")
            if gold is None
            else Winnable("no", f"its {self.column} {gold[:60]!r} {lost[gold]}")
            if gold in lost
            else Winnable("yes")
            for gold in golds
        ]

    def _golds(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """The right answers, None where missing."""
        if not meta:
            self.check_prompts(prompts, meta)
        golds = [cell(row, self.column) for row in meta]
        return [answer_text(gold) for gold in golds]

    def _empty(self, golds: Sequence[str | None]) -> dict[str, str]:
        """Right answers without anything that a completion could have, or that no completion can
        put into a box (or, with `find: any`, a formula)."""
        lost: dict[str, str] = {}
        for gold in dict.fromkeys(golds):
            if gold is None:
                continue
            right = right_answer(gold)
            if not has_content(right):
                lost[gold] = "contains no answer"
            elif not self._can_stand(right):
                lost[gold] = "has braces that no box can hold"
        return lost

    def _can_stand(self, right: str) -> bool:
        """Whether a completion with the right answer is read as having it."""
        ways = [rf"\boxed{{{right}}}"] + [f"${right}$"] * (self.find == "any")
        answers = [last_answer(way, self.find == "boxed") for way in ways]
        return any(one is not None and same_text(one, right) for one in answers)

    def _lost(self, golds: Sequence[str | None]) -> dict[str, str]:
        """Right answers that no completion can match, each with the reason. All are parsed before
        anything is scored: a machine that is too busy to read one may not fail its samples."""
        lost = self._empty(golds)
        new = [gold for gold in dict.fromkeys(golds) if gold is not None and gold not in lost]
        unread = [gold for gold in new if gold not in self.readable]
        limit = max(self.workers.seconds, READING)
        verdicts = self.workers.ask(
            [{"gold": simplified(right_answer(gold))} for gold in unread], limit
        )
        self.readable.update(
            gold for gold, verdict in zip(unread, verdicts, strict=True) if verdict is not None
        )
        late = f"could not be read within {limit:g} s"
        return lost | {gold: late for gold in new if gold not in self.readable}

    def _place(self, row: int, prompts: Sequence[str], gold: str | None) -> str:
        return (
            f"math_answer: row {row + 1} (prompt {prompts[row][:60]!r}): its {self.column} "
            f"{str(gold)[:60]!r}"
        )

    def answers(self, samples: Samples) -> list[str | None]:
        """The answer of each text as an expression; None if none can be read in time."""
        boxed = self.find == "boxed"
        texts = {text: last_answer(text, boxed) for text in dict.fromkeys(samples.media)}
        unlike = list(dict.fromkeys(simplified(one) for one in texts.values() if one is not None))
        read = self.workers.ask([{"read": one} for one in unlike])
        canonical = dict(zip(unlike, read, strict=True))
        return [
            None if (text_form := texts[text]) is None or canonical[simplified(text_form)] is None
            # what is no mathematics votes by its text
            else canonical[simplified(text_form)] or simplified(text_form)
            for text in samples.media
        ]  # fmt: skip

    def report(self) -> dict[str, float]:
        """`late`: number of comparisons that took too long and scored 0; `unreadable`: samples
        without a score, since no text matches their right answer."""
        late, self.workers.late = self.workers.late, 0
        unreadable, self.counts["unreadable"] = self.counts["unreadable"], 0
        return {"late": float(late), "unreadable": float(unreadable)}

    def examples(self) -> Samples:
        """The right answer in another form, and a wrong one."""
        texts = [r"It is $\boxed{\frac{1}{2}}$.", r"It is $\boxed{\frac{1}{3}}$."]
        meta = [{self.column: "0.5"}] * 2
        return Samples(texts, ["1 - 1/2"] * 2, torch.zeros(2, dtype=torch.long), meta)


def load(
    find: Literal["any", "boxed"] = "any",
    column: NeededColumn = "answer",
    seconds: Positive = 5.0,
    processes: OneOrMore = 2,
) -> Reward:
    r"""find       any: the last box, tag or ####, else formula, else number; boxed: TeX's \boxed{}
               only
    column     column of the prompt file with the right answer: TeX or a number, bare, in $$ or
               \boxed{}, or after ####; or a list of answers that all belong to it
    seconds    time limit per comparison, above 0; a comparison that takes longer scores 0
    processes  worker processes that compare at the same time, at least 1, about 100 MB each
    """
    needs_math_verify({})
    script = Path(__file__).parents[1] / "sandbox" / "math_worker.py"
    return MathAnswer(Workers(script, processes, seconds), find, column)
