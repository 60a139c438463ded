"""UniGenBench (arXiv:2510.18701): a judge checks each test point of a prompt, yes or no.

The columns `testpoints` and `testpoint_descriptions` list the test points of a prompt, such as
`Attribute - Color` with "a red hat"; the suite `unigenbench:FILE` reads them from the official
prompt files. All points of a sample go into one request: the authors' question with the prompt, the
points, a definition of each, and the descriptions. The answer has two lists, `<analysis>` and
`<score>`; both need an entry per point, otherwise the question is asked again (up to `tries` times,
in their code until it fits), and then the sample is unscored. A point that scores 1 is right, any
other is wrong.

    score = share of the prompt's points that are right

An evaluation also reports, as published, the accuracy of each test point and of each of the ten
primary dimensions, where every (sample, point) counts once. That the leaderboard's overall number
is their mean is from memory: the authors' scripts do not print it.

`question` is the authors' `eval/src/eval_common.py`, with the language chosen by the test points of
each prompt, or one of their older scripts; it is read but never run. Their judges are
UniGenBench-EvalModel behind vLLM, which gets a JPEG of quality 95 before the text, and Gemini 2.5
Pro, which gets the text before the image file (`image: last`). Requests have temperature 0 here;
theirs use the server's default.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.catalogue.unified_reward import JPEG_QUALITY
from rewards.judging import chat
from rewards.judging.checkpoint_question import CheckpointQuestion
from rewards.judging.panel import LONG_ANSWER, Messages, Panel, PanelSettings
from rewards.judging.tally import AnswerTally
from rewards.perception.media import expect, items
from rewards.rights import ReadFile
from rewards.serving.requests import Malformed
from rewards.types import Inline, Kind, Reward, Samples, cell

SCORED_KINDS: tuple[Kind, ...] = ("image",)

NEEDED_COLUMNS = POINTS, DESCRIPTIONS = ("testpoints", "testpoint_descriptions")


def points_in(answer: chat.Completion, size: int) -> list[float]:
    """1 or 0 for each test point. A list of another length is Malformed, so the question is asked
    again."""
    analysis, score = (_list_in(answer.text, tag) for tag in ("analysis", "score"))
    if len(analysis) != size or len(score) != size:
        raise Malformed
    return [float(type(value) is int and value == 1) for value in score]


def _list_in(text: str, tag: str) -> list[Any]:
    match = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    try:
        value = ast.literal_eval(match[1].strip()) if match else None
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise Malformed from error
    if not isinstance(value, list):
        raise Malformed
    return value


@dataclass(frozen=True)
class UniGenBench:
    panel: Panel
    questions: tuple[CheckpointQuestion, ...]
    image_first: bool
    one_call: ClassVar[bool] = True
    tally: AnswerTally = field(default_factory=lambda: AnswerTally(overall=True), repr=False)

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "unigenbench", "image")
        scores = torch.full((len(samples.prompts),), torch.nan, dtype=torch.float64)
        rows, about, points = [], [], []
        for row, item in enumerate(items(samples)):
            points_of_row, texts = _points(samples.meta[row] if samples.meta else {}, row)
            if points_of_row:
                question = _question(points_of_row, row, self.questions)
                text = question.fill(samples.prompts[row], points_of_row, texts)
                about.append(self._message(text, item))
                rows.append(row)
                points.append(points_of_row)
        answers = self.panel.lists(
            about, points_in, [len(points_of_row) for points_of_row in points], LONG_ANSWER
        )
        for row, points_of_row, right in zip(rows, points, answers, strict=True):
            if right:
                scores[row] = sum(right) / len(right)
                for point, value in zip(points_of_row, right, strict=True):
                    self.tally.add(point, value)
        return scores

    def _message(self, text: str, image: Tensor) -> Messages:
        if self.image_first:
            return chat.user(chat.image_part(image, JPEG_QUALITY), text)
        return chat.user(text, chat.image_part(image))

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError, naming the row, for a prompt without test points."""
        for row in range(len(prompts)):
            points_of_row = _points(meta[row] if meta else {}, row)[0]
            if points_of_row:
                _question(points_of_row, row, self.questions)
            else:
                raise ValueError(
                    f"unigenbench: row {row + 1} of the prompts has no column {POINTS!r}: "
                    "convert the official file with flowrl suites unigenbench:FILE --out "
                    "prompts.jsonl"
                )


def _points(row: Mapping[str, Any], number: int) -> tuple[list[str], list[str]]:
    points, texts = cell(row, POINTS) or [], cell(row, DESCRIPTIONS) or []
    if not isinstance(points, list) or not isinstance(texts, list) or len(points) != len(texts):
        raise ValueError(
            f"unigenbench: row {number + 1}: {POINTS} and {DESCRIPTIONS} must be two lists of "
            "the same length"
        )
    return list(map(str, points)), list(map(str, texts))


def _question(
    points: list[str], number: int, questions: tuple[CheckpointQuestion, ...]
) -> CheckpointQuestion:
    """The question, in one language, that defines all points of a row."""
    unknown = [[p for p in points if p not in one.definitions] for one in questions]
    for question, odd in zip(questions, unknown, strict=True):
        if not odd:
            return question
    defined = "; or ".join(", ".join(one.definitions) for one in questions)
    raise ValueError(
        f"unigenbench: row {number + 1}: the question does not define the test point "
        f"{min(unknown, key=len)[0]!r}; it defines {defined}: use the file in the prompts' "
        "language"
    )


def load(
    server: Inline[PanelSettings], question: ReadFile, image: Literal["first", "last"] = "first"
) -> Reward:
    """Load the reward. Scores are in 0..1.

    question  the authors' `eval/src/eval_common.py` or an older script of theirs, which is not run
    image     place of the image in the message: first as JPEG of quality 95, for the authors'
              model; last as PNG, for Gemini
    """
    return UniGenBench(
        server.open(), CheckpointQuestion.read("unigenbench", question), image == "first"
    )
