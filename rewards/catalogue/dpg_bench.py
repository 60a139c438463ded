"""DPG-Bench (ELLA, arXiv:2403.05135): questions that depend on each other, answered yes or no.

The column `dpg_questions` has a prompt's questions, in the order of the official file: `id`,
`parents` (ids of the questions that must be answered yes first; 0 means none), `tuple` and
`question`. The suite `dpg_bench:dpg_bench.csv` reads them.

    answer = 1 if yes, otherwise 0; then, in the file's order, 0 if any parent has 0
    score  = mean over the prompt's questions (the benchmark reports 100 times that)

An evaluation also reports the share of yes by category: the text of `tuple` before its bracket, as
`entity - whole`, and the part before the hyphen, without the parents' rule (github.com/
TencentQQGYLab/ELLA, dpg_bench/compute_dpg_bench.py at 025f650e). The published judge is mPLUG-large
for visual questions, which is not in transformers; here it is the model behind the server, so
numbers are those of that judge. The published script skips the first row of the csv by mistake;
here it counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.judging.panel import Panel, PanelSettings
from rewards.judging.tally import AnswerTally
from rewards.judging.yes_no import yes_of_each
from rewards.perception.media import expect
from rewards.types import Inline, Kind, Reward, Samples, cell

SCORED_KINDS: tuple[Kind, ...] = ("image",)

DPG_COLUMN = "dpg_questions"
NEEDED_COLUMNS = (DPG_COLUMN,)
NO_PARENT = 0
Question = Mapping[str, Any]


def dependent(questions: Sequence[Question], yes: Sequence[bool]) -> list[float]:
    """Answers as 1 or 0, in the order of the questions; 0 if any question that one depends on has
    0."""
    value = {q["id"]: float(answer) for q, answer in zip(questions, yes, strict=True)}
    for q in questions:
        if any(value[parent] == 0 for parent in q["parents"] if parent != NO_PARENT):
            value[q["id"]] = 0.0
    return [value[q["id"]] for q in questions]


@dataclass(frozen=True)
class DpgBench:
    panel: Panel
    one_call: ClassVar[bool] = True
    tally: AnswerTally = field(default_factory=AnswerTally, repr=False)

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "dpg_bench", "image")
        n = len(samples.prompts)
        questions_by_row = [
            _questions(samples.meta[row] if samples.meta else {}, row) for row in range(n)
        ]
        texts = [[str(q["question"]) for q in questions] for questions in questions_by_row]
        scores = torch.full((n,), torch.nan, dtype=torch.float64)
        for row, chances in enumerate(yes_of_each(self.panel, samples, texts)):
            if not chances or any(chance != chance for chance in chances):
                continue
            yes = [chance > 0.5 for chance in chances]
            scores[row] = sum(dependent(questions_by_row[row], yes)) / len(yes)
            for q, answer in zip(questions_by_row[row], yes, strict=True):
                self.tally.add(str(q["tuple"]).partition("(")[0].strip(), float(answer))
        return scores

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError, naming the row, for a prompt without questions."""
        for row in range(len(prompts)):
            if not _questions(meta[row] if meta else {}, row):
                raise ValueError(
                    f"dpg_bench: row {row + 1} of the prompts has no column {DPG_COLUMN!r}: "
                    "convert the official file with flowrl suites dpg_bench:FILE --out "
                    "prompts.jsonl"
                )


def _questions(row: Mapping[str, Any], number: int) -> list[Question]:
    questions = cell(row, DPG_COLUMN) or []
    keys = {"id", "parents", "tuple", "question"}
    if not isinstance(questions, list) or not all(
        isinstance(q, Mapping) and keys <= set(q) for q in questions
    ):
        raise ValueError(
            f"dpg_bench: row {number + 1}: {DPG_COLUMN} must be a list of mappings with "
            f"{sorted(keys)}"
        )
    numbers = {q["id"] for q in questions}
    if lost := [p for q in questions for p in q["parents"] if p != NO_PARENT and p not in numbers]:
        raise ValueError(
            f"dpg_bench: row {number + 1}: a question depends on the id {lost[0]}, which no "
            "question has"
        )
    return questions


def load(server: Inline[PanelSettings]) -> Reward:
    """Load the reward. Scores are in 0..1."""
    return DpgBench(server.open())
