"""A vision-language model as a judge, behind any server with OpenAI's chat completions API, such as
vLLM or SGLang.

`load` is a pointwise reward, `judge` a judge of pairs for `win_rate`. A sample
without a readable answer after all tries is unscored and counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rewards.judging import answers, chat
from rewards.judging.checklist import Checklist
from rewards.judging.panel import (
    LONG_ANSWER,
    SHORT_ANSWER,
    AnswerReader,
    Messages,
    Panel,
    PanelSettings,
)
from rewards.perception.media import items
from rewards.types import Inline, Judge, Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image", "video", "text")

SCORINGS: dict[str, tuple[str, AnswerReader, dict[str, Any]]] = {
    "score": (chat.SCORE, answers.score_in, LONG_ANSWER),
    "expected": (chat.EXPECTED, answers.expected_in, SHORT_ANSWER),
    "yes_no": (chat.YES_NO, answers.yes_in, SHORT_ANSWER),
}
COMPARINGS: dict[str, tuple[str, AnswerReader, dict[str, Any]]] = {
    "verdict": (chat.VERDICT, answers.verdict_in, LONG_ANSWER),
    "probability": (chat.WHICH, answers.which_in, SHORT_ANSWER),
}


@dataclass(frozen=True)
class Pointwise:
    """Asks one question per sample; answers are in 0..1. `last`: the question comes after the
    sample."""

    panel: Panel
    template: str
    read: AnswerReader
    body: Mapping[str, Any]
    last: bool = False
    one_call: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    concurrent: ClassVar[bool] = True

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        kind, frames = samples.kind, self.panel.frames
        about: list[Messages] = []
        for prompt, item in zip(samples.prompts, items(samples), strict=True):
            question = chat.fill(self.template, kind, prompt)
            shown = chat.message_parts(item, kind, frames)
            about.append(chat.user(*shown, question) if self.last else chat.user(question, *shown))
        return self.panel.values(about, self.read, self.body)

    def examples(self) -> Samples:
        return self.panel.examples()


def unread_by_winner(ab: Float[Tensor, " p"], ba: Float[Tensor, " p"]) -> dict[str, float]:
    """Verdicts that could not be read in one of a pair's two orders, by the place of the sample
    that wins in the other: a judge whose answers fail for one winner alone biases all scores.

    `ab` and `ba`: probabilities that the first sample shown wins; NaN where unread.
    """
    other = torch.cat([1 - ba[ab.isnan()], 1 - ab[ba.isnan()]])  # of the unread order's first
    counts = {"unread_first": (other > 0.5).sum(), "unread_second": (other < 0.5).sum()}
    return {name: float(count) for name, count in counts.items() if count}


@dataclass(frozen=True)
class Pairwise:
    """P(a is better). With `both_orders`, each pair is judged twice with the samples swapped.

    The mean of P(a first wins) and 1 - P(b first wins) cancels a preference for the first place; a
    pair needs both verdicts.
    """

    panel: Panel
    template: str
    read: AnswerReader
    body: Mapping[str, Any]
    both_orders: bool = True

    def __call__(
        self, samples: Samples, a: Int[Tensor, " p"], b: Int[Tensor, " p"]
    ) -> Float[Tensor, " p"]:
        first, second = (a, b) if not self.both_orders else (torch.cat([a, b]), torch.cat([b, a]))
        p = self.panel.values(self._about(samples, first, second), self.read, self.body)
        verdicts = float((~p.isnan()).sum())
        self.panel.note({"first_wins": float(p.nansum()), "verdicts": verdicts})
        if not self.both_orders:
            return p
        self.panel.note(unread_by_winner(*p.split(len(a))))
        return (p[: len(a)] + 1 - p[len(a) :]) / 2

    def _about(
        self, samples: Samples, first: Int[Tensor, " q"], second: Int[Tensor, " q"]
    ) -> list[Messages]:
        kind, prompts = samples.kind, list(samples.prompts)
        used = set(first.tolist()) | set(second.tolist())
        media = items(samples)
        shown = {row: chat.message_parts(media[row], kind, self.panel.frames) for row in used}
        name = kind.capitalize()
        return [
            chat.user(
                chat.fill(self.template, kind, prompts[i]),
                f"{name} 1:",
                *shown[i],
                f"{name} 2:",
                *shown[j],
            )
            for i, j in zip(first.tolist(), second.tolist(), strict=True)
        ]

    def examples(self) -> Samples:
        return self.panel.examples()


def load(
    server: Inline[PanelSettings],
    kind: Literal["score", "expected", "yes_no", "checklist"] = "score",
    question: str | None = None,
) -> Reward:
    """Load the reward. Scores are in 0..1.

    kind      score: `Score: N` in 1..5 of a reasoned answer; expected: the mean digit under the
              model's probabilities; yes_no: P(yes); checklist: the share of yes over questions that
              the model writes itself; all mapped to 0..1
    question  text in place of the built-in question, with {prompt} where the prompt goes; null
              keeps it; not with checklist
    """
    if question is not None and kind == "checklist":
        raise ValueError("judge: a checklist writes its own questions; leave out question")
    panel = server.open()
    if kind == "checklist":
        return Checklist(panel)
    template, read, request = SCORINGS[kind]
    return Pointwise(panel, question or template, read, request)


def judge(
    server: Inline[PanelSettings],
    kind: Literal["verdict", "probability"] = "verdict",
    question: str | None = None,
    both_orders: bool = True,
) -> Judge:
    """Load a judge of pairs.

    kind         verdict: the answer's `<answer>Image 1 is better</answer>`; probability: the
                 model's probabilities of 1 and 2
    question     text in place of the built-in question, with {prompt} where the prompt goes; null
                 keeps it
    both_orders  whether each pair is judged twice with the samples swapped, which cancels a
                 preference for the first place and costs twice the requests
    """
    template, read, request = COMPARINGS[kind]
    return Pairwise(server.open(), question or template, read, request, both_orders)
