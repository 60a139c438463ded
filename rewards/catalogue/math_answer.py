"""1 if the answer in a text is mathematically equal to the right answer, otherwise 0.

The package math-verify parses and compares: 0.5, 1/2 and a TeX fraction are equal, as are sets,
intervals, matrices and expressions that simplify to each other. A completion without mathematics
scores 0, as does a comparison that takes longer than `seconds`. Worker processes do the work and
are killed when they are late; no signals are used, so any thread may call the reward.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.perception.media import expect
from rewards.serving.workers import Workers
from rewards.types import Reward, Samples, cell

READING = 60.0  # seconds to read one right answer: a busy machine must not end a run
SHOWN = 256  # right answers that are parsed before a run; the others when their prompt is used


@dataclass(frozen=True)
class MathAnswer:
    workers: Workers
    find: Literal["any", "boxed"]
    column: str

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "math_answer", "text")
        golds = self._golds(samples.prompts, samples.meta)
        scores = torch.full((len(golds),), torch.nan, dtype=torch.float64)
        rows = [row for row, gold in enumerate(golds) if gold is not None]
        pairs = [(golds[row], samples.media[row]) for row in rows]
        unlike = list(dict.fromkeys(pairs))
        boxed = self.find == "boxed"
        verdicts = self.workers.ask([{"gold": g, "text": t, "boxed": boxed} for g, t in unlike])
        right = dict(zip(unlike, verdicts, strict=True))
        for row, pair in zip(rows, pairs, strict=True):
            scores[row] = float(right[pair] is True)
        return scores

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError, naming the row, if its answer cannot be read."""
        if not any(cell(row, self.column) is not None for row in meta):
            raise ValueError(
                f"math_answer: no prompt has a column {self.column!r}; add it to the prompt "
                "file, or name another with `column`"
            )
        self._golds(prompts[:SHOWN], meta[:SHOWN])

    def _golds(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """The right answers, None where missing. All are parsed before anything is scored."""
        if not meta:
            self.check_prompts(prompts, meta)
        given = [cell(row, self.column) for row in meta]
        golds = [None if gold is None else str(gold) for gold in given]
        unlike = list(dict.fromkeys(gold for gold in golds if gold is not None))
        limit = max(self.workers.seconds, READING)
        readable = self.workers.ask([{"gold": g} for g in unlike], limit)
        read = dict(zip(unlike, readable, strict=True))
        for row, gold in enumerate(golds):
            if gold is not None and read[gold] is None:
                raise ValueError(
                    f"math_answer: row {row + 1} (prompt {prompts[row][:60]!r}): its "
                    f"{self.column} {gold[:60]!r} could not be read within {limit:g} s; fix the "
                    "prompt file, or leave the row's answer out to have it unscored"
                )
            if gold is not None and read[gold] is not True:
                raise ValueError(
                    f"math_answer: row {row + 1} (prompt {prompts[row][:60]!r}): its "
                    f"{self.column} {gold[:60]!r} contains no mathematics; fix the prompt file, "
                    "or leave the row's answer out to have it unscored"
                )
        return golds

    def answers(self, samples: Samples) -> list[str | None]:
        """The answer of each text as an expression; None if none can be read in time."""
        unlike = list(dict.fromkeys(samples.media))
        boxed = self.find == "boxed"
        read = self.workers.ask([{"read": text, "boxed": boxed} for text in unlike])
        found = dict(zip(unlike, read, strict=True))
        return [found[text] or None for text in samples.media]

    def report(self) -> dict[str, float]:
        """`late`: number of comparisons that took too long and scored 0."""
        late, self.workers.late = self.workers.late, 0
        return {"late": float(late)}

    def examples(self) -> Samples:
        """The right answer in another form, and a wrong one."""
        texts = [r"It is $\boxed{\frac{1}{2}}$.", r"It is $\boxed{\frac{1}{3}}$."]
        meta = [{self.column: "0.5"}] * 2
        return Samples(texts, ["1 - 1/2"] * 2, torch.zeros(2, dtype=torch.long), meta)


def load(
    find: Literal["any", "boxed"] = "any",
    column: str = "answer",
    seconds: float = 5.0,
    processes: int = 2,
) -> Reward:
    r"""find       any: the last box, else the last TeX, else the last number; boxed: TeX's
                  \boxed{} only
    column     holds the right answer: TeX or a number, bare, in $$ or \boxed{}, or after ####
    seconds    time limit per comparison; a comparison that takes longer scores 0
    processes  number of parallel worker processes, about 100 MB each
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("math_answer needs math-verify: pip install 'flowrl[math]'")
    if seconds <= 0 or processes < 1:
        raise ValueError(
            f"math_answer: seconds must be above 0 and processes at least 1, not {seconds} and "
            f"{processes}"
        )
    script = Path(__file__).parents[1] / "sandbox" / "math_worker.py"
    return MathAnswer(Workers(script, processes, seconds), find, column)
