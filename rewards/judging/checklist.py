"""Scores from a list of yes-or-no questions about the sample."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.judging import answers, chat
from rewards.judging.panel import LONG_ANSWER, SHORT_ANSWER, Panel
from rewards.perception.media import items
from rewards.serving.bounded import tokens_asked
from rewards.serving.requests import Ask, Failure
from rewards.types import Kind, Samples


@dataclass(frozen=True)
class Checklist:
    """Share of yes answers to a prompt's questions, as in DSG, arXiv:2310.18235.

    Questions are in the prompt file's column `questions` (a list), or the model writes them once
    per prompt. A sample is scored if more than half of its questions were answered.
    """

    panel: Panel
    one_call: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    made: dict[str, list[str]] = field(default_factory=dict, repr=False)

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        kind, prompts = samples.kind, list(samples.prompts)
        n = len(prompts)
        self._make([p for i, p in enumerate(prompts) if not _own(samples, i)], kind)
        lists = [_own(samples, i) or self.made.get(p, []) for i, p in enumerate(prompts)]
        shown = [chat.message_parts(item, kind, self.panel.frames) for item in items(samples)]
        rows = torch.tensor([i for i in range(n) for _ in lists[i]], dtype=torch.long)
        about = [
            chat.user(chat.fill(chat.ASPECT, kind, prompts[i], question), *shown[i])
            for i in range(n)
            for question in lists[i]
        ]
        yes = self.panel.values(about, answers.yes_in, SHORT_ANSWER)
        read = (~yes.isnan()).double()
        none = torch.zeros(n, dtype=torch.float64)
        total, answered = (none.index_add(0, rows, v) for v in (yes.nan_to_num(0.0), read))
        questions = torch.tensor([len(questions_of_row) for questions_of_row in lists])
        return torch.where(2 * answered > questions, total / answered, torch.nan)

    def _make(self, prompts: Sequence[str], kind: Kind) -> None:
        new = [p for p in dict.fromkeys(prompts) if p not in self.made]
        common = {"model": self.panel.model, "temperature": 0.0, **LONG_ANSWER, **self.panel.body}
        asks = [
            Ask(
                "/chat/completions",
                {**common, "messages": chat.user(chat.fill(chat.QUESTIONS, kind, prompt))},
                {"checklist": prompt},
                tokens_asked(common),
            )
            for prompt in new
        ]
        outcomes = self.panel.client.ask(
            asks, lambda _, answer: answers.questions_in(chat.completion(answer))
        )
        for prompt, questions in zip(new, outcomes, strict=True):
            if not isinstance(questions, Failure):  # otherwise requested again next time
                self.made[prompt] = questions

    def examples(self) -> Samples:
        return self.panel.examples()


def _own(samples: Samples, row: int) -> list[str]:
    return list(samples.meta[row].get("questions") or ()) if samples.meta else []
