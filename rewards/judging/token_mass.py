"""Probability of single tokens at the start of an answer, over the model's whole vocabulary.

A server lists the most likely tokens of a position, usually twenty. A token beyond the list counts
0; its true probability is at most that of the list's last entry.
"""

import math
from collections.abc import Iterable

from rewards.judging.chat import Completion
from rewards.serving.requests import Unparsable


def first_token_mass(answer: Completion, forms: Iterable[str]) -> float:
    """Total probability of the forms as the first token; case and whitespace matter.

    A form that is listed twice counts twice. Raises Unparsable without log-probabilities.
    """
    logprobs = answer.choices[0].logprobs
    positions = (logprobs.content if logprobs is not None else None) or []
    if not positions or not positions[0].top_logprobs:
        raise Unparsable("no log-probabilities of the first token")
    mass: dict[str, float] = {}
    for token in positions[0].top_logprobs:
        mass[token.token] = mass.get(token.token, 0.0) + math.exp(min(token.logprob, 0.0))
    return sum(mass.get(form, 0.0) for form in forms)
