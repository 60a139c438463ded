"""Yes-or-no questions about samples, several per sample, as one call of a panel."""

from collections.abc import Sequence

from rewards.judging import answers, chat
from rewards.judging.panel import SHORT_ANSWER, Messages, Panel
from rewards.perception.media import items
from rewards.types import Samples


def yes_of_each(
    panel: Panel, samples: Samples, questions: Sequence[Sequence[str]]
) -> list[list[float]]:
    """P(yes) for every question of every sample; NaN for an answer that could not be read.

    P(yes) / (P(yes) + P(no)) if the server has log-probabilities, otherwise 1 or 0 from the word
    itself.
    """
    kind = samples.kind
    about: list[Messages] = []
    for own_questions, item, prompt in zip(questions, items(samples), samples.prompts, strict=True):
        shown = chat.message_parts(item, kind, panel.frames) if own_questions else []
        for question in own_questions:
            text = chat.fill(chat.ASPECT, kind, prompt, question)
            about.append(chat.user(text, *shown))
    flat = iter(panel.values(about, answers.yes_in, SHORT_ANSWER).tolist())
    return [[next(flat) for _ in own_questions] for own_questions in questions]
