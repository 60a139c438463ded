"""The UnifiedReward family behind a server: 1.0 and 2.0 (arXiv:2503.05236), Think
(arXiv:2505.03318), Edit, Flex.

`load` scores one sample, `judge` compares two for `win_rate`. Images are sent as JPEG of quality
95, before the text, in one turn, at temperature 0, as in the authors' clients; for a video,
`frames` images at int(i total / n) are sent. The question is a file: each release has its own, and
none comes with flowrl. `{prompt}` stands for the prompt (the authors' f-strings have the caption or
the instruction there). No digest of these texts is known here, so no digest is checked.

Supported forms of answers, each with its own range (`rewards.judging.answers`): `Final Score: 3.4`
(1 to 5; videos 1 to 10), three axes such as `Alignment Score (1-5): 3.1`, `Image 1 is better.`,
`<answer>Image 2 is better</answer>` after reasoning, two shares per axis, two signed numbers
(Edit), `winner` of a JSON object (Flex). `axis` takes one axis instead of their mean.

With `column`, which names the source image of an edit, the source is shown first. The reward
`editscore` reads EditScore's JSON, which UnifiedReward-Edit returns for single edits. Tested only
with answers of the published forms, not with the published weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rewards.judging import answers, chat
from rewards.judging.panel import AnswerReader, Messages, Panel, PanelSettings
from rewards.perception.media import expect, items
from rewards.perception.references import check_image_column, column_images
from rewards.rights import ReadFile, Right, need
from rewards.types import Inline, Judge, Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

JPEG_QUALITY = 95
REQUEST: Mapping[str, Any] = {"max_tokens": 4096}
Axis = Literal["all", "alignment", "coherence", "style", "physics"]


@dataclass(frozen=True)
class Questioner:
    """Builds the messages: first the source, then the samples, then the text."""

    panel: Panel
    question: str
    read: AnswerReader
    column: str | None

    def messages(self, samples: Samples, rows: Sequence[tuple[int, ...]]) -> list[Messages | None]:
        """One message for each choice of rows; None if the source cannot be read."""
        kind = expect(samples, "unified_reward", "image", "video")
        media, count = items(samples), self.panel.frames
        sources = column_images("unified_reward", samples, self.column) if self.column else []
        used = sorted({row for chosen in rows for row in chosen})
        shown = {row: _parts(media[row], kind, count) for row in used}
        questions: list[Messages | None] = []
        for chosen in rows:
            text = chat.fill(self.question, kind, samples.prompts[chosen[0]])
            parts = [part for row in chosen for part in shown[row]]
            source = sources[chosen[0]] if sources else None
            if source is not None:
                parts = [chat.image_part(source, JPEG_QUALITY), *parts]
            questions.append(None if self.column and source is None else chat.user(*parts, text))
        return questions

    def values(self, samples: Samples, rows: Sequence[tuple[int, ...]]) -> Float[Tensor, " q"]:
        scores = torch.full((len(rows),), torch.nan, dtype=torch.float64)
        about = self.messages(samples, rows)
        asked = [index for index, message in enumerate(about) if message is not None]
        if asked:
            whole = [message for message in about if message is not None]
            scores[asked] = self.panel.values(whole, self.read, REQUEST)
        return scores


def _parts(item: Tensor, kind: Kind, frames: int) -> list[str | dict[str, Any]]:
    if kind == "video":
        taken = min(frames, len(item))
        item = item[[int(i * len(item) / taken) for i in range(taken)]]
    return chat.message_parts(item, kind, frames, JPEG_QUALITY)


@dataclass(frozen=True)
class UnifiedScore:
    """Asks one question per sample; answers are in 0..1."""

    ask: Questioner
    one_call: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    concurrent: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        return self.ask.values(samples, [(row,) for row in range(len(samples.prompts))])

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        if self.ask.column is not None:
            check_image_column("unified_reward", self.ask.column, prompts, meta)


@dataclass(frozen=True)
class UnifiedPreference:
    """P(a is better). With `both_orders` the mean of both orders, NaN unless both could be read."""

    ask: Questioner
    both_orders: bool

    def __call__(
        self, samples: Samples, a: Int[Tensor, " p"], b: Int[Tensor, " p"]
    ) -> Float[Tensor, " p"]:
        pairs = list(zip(a.tolist(), b.tolist(), strict=True))
        swapped = [(second, first) for first, second in pairs] if self.both_orders else []
        p = self.ask.values(samples, [*pairs, *swapped])
        if not self.both_orders:
            return p
        return (p[: len(pairs)] + 1 - p[len(pairs) :]) / 2


def load(
    server: Inline[PanelSettings], question: ReadFile, axis: Axis = "all", column: str | None = None
) -> Reward:
    """Load the reward. Scores are in 0..1: (x - 1) / 4, and (x - 1) / 9 for videos rated 1..10.

    question  file with the question of your release, with {prompt} where the prompt goes
    axis      axis that counts where the answer has several; all is their mean
    column    column of the prompt file with the path of an edit's source image, which is shown
              first; null shows none
    """
    read = answers.score_in if axis == "all" else partial(answers.axis_in, axis=axis)
    return UnifiedScore(Questioner(server.open(), _read(question), read, column))


def judge(
    server: Inline[PanelSettings],
    question: ReadFile,
    both_orders: bool = True,
    column: str | None = None,
) -> Judge:
    """Load a judge that returns P(first is better) in 0..1. For the other settings see `load`.

    both_orders  whether each pair is judged twice with the samples swapped, which cancels a
                 preference for the first place and costs twice the requests
    """
    ask = Questioner(server.open(), _read(question), answers.verdict_in, column)
    return UnifiedPreference(ask, both_orders)


def _read(question: str) -> str:
    path = Path(question)
    need(Right.FILES, question, path=path)
    if not path.is_file():
        raise ValueError(
            f"unified_reward: question: no such file: {question}; copy the text from your "
            "release's client (github.com/CodeGoat24/UnifiedReward), with {prompt} in place "
            "of the prompt"
        )
    text = path.read_text(encoding="utf-8")
    if "{prompt}" not in text:
        raise ValueError(f"unified_reward: question: {question} does not contain {{prompt}}")
    return text
