"""Given completions as the tokens that the model would have sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int

from flowrl.errors import UserError
from flowrl.likelihoods.rows import TokenRows, unlike_texts
from flowrl.models.language.batch import TextBatch
from flowrl.models.language.turns import turn_template

NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


def completion_tokens(
    batch: TextBatch, text: str, length: int, template: Mapping[str, Any] = NO_ARGUMENTS
) -> list[int]:
    """Tokens of a completion with its end, as the model would have sampled them from `batch`.

    The chat template decides what the turn begins and ends with
    (`flowrl.models.language.turns.TurnTemplate.completion`; `template` are its arguments). Without
    one, the end is the tokenizer's if the model stops at it, otherwise the first stop token. A
    completion of more than `length` tokens is cut to `length`, without an end token.
    """
    return turn_template(batch.tokenizer, template).completion(text, batch.stop)[:length]


def check_length(batch: TextBatch, text: str, length: int, place: str) -> None:
    """UserError, beginning with `place`, for an empty completion or one with more than `length`
    tokens."""
    count = len(completion_tokens(batch, text, 10**9, batch.template))
    if not batch.tokenizer(text, add_special_tokens=False).input_ids:
        raise UserError(f"{place}: the completion {text!r:.50} has no tokens")
    if count > length:
        raise UserError(
            f"{place}: the completion has {count} tokens, including its end, but recipe.length "
            f"is {length}: raise it, or set given.fit: crop"
        )


def completion_rows(
    batch: TextBatch,
    texts: Sequence[str],
    prompt: Int[torch.Tensor, " b"],
    advantage: Float[torch.Tensor, " b"],
    paired: bool = False,
) -> TokenRows:
    """Rows of given completions: all of their tokens are in the loss, at temperature 1. Of `paired`
    ones a pair is masked whose tokens are equal, as two long texts with one beginning may be."""
    ids = [completion_tokens(batch, text, batch.steps, batch.template) for text in texts]
    lengths = torch.tensor([len(tokens) for tokens in ids])
    width = int(lengths.max())
    padded = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in ids])
    mask = torch.arange(width) < lengths[:, None]
    rows = TokenRows(
        prompt=prompt,
        advantage=advantage[:, None] * mask,
        mask=mask,
        old=None,
        ids=padded,
        lengths=lengths,
        temperature=1.0,
        kept=None,
    )
    return replace(rows, mask=mask & unlike_texts(rows)[:, None]) if paired else rows
