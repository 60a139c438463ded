"""Given completions as the tokens that the model would have sampled."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int

from flowrl.errors import UserError
from flowrl.likelihoods.rows import TokenRows
from flowrl.models.language.batch import TextBatch


def completion_tokens(batch: TextBatch, text: str, length: int) -> list[int]:
    """Tokens of a completion and its end token, as `batch` would have sampled them.

    The end token is the tokenizer's if the model stops at it, otherwise the first stop token. A
    completion of more than `length` tokens is cut to `length`, without an end token.
    """
    ids = list(batch.tokenizer(text, add_special_tokens=False).input_ids)
    own = batch.tokenizer.eos_token_id
    ends = [own] if own in batch.stop else list(batch.stop[:1])
    return [*ids, *ends][:length]


def check_length(batch: TextBatch, text: str, length: int, place: str) -> None:
    """UserError, beginning with `place`, for an empty completion or one with more than `length`
    tokens."""
    count = len(completion_tokens(batch, text, 10**9))
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
) -> TokenRows:
    """Rows of given completions: all of their tokens are in the loss, at temperature 1."""
    ids = [completion_tokens(batch, text, batch.steps) for text in texts]
    lengths = torch.tensor([len(each) for each in ids])
    width = int(lengths.max())
    padded = torch.tensor([[*each, *[0] * (width - len(each))] for each in ids])
    mask = torch.arange(width) < lengths[:, None]
    return TokenRows(
        prompt=prompt,
        advantage=advantage[:, None] * mask,
        mask=mask,
        old=None,
        ids=padded,
        lengths=lengths,
        temperature=1.0,
        kept=None,
    )
