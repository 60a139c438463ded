"""Tokens of texts that go on, by a tokenizer that may end every text."""

from collections.abc import Sequence
from typing import Any


def unended_tokens(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that goes on: with the tokenizer's beginning, without an end that it adds
    (`add_eos_token`), after which a model would begin another text."""
    return without_added_end(tokenizer, text, tokenizer(text).input_ids)


def added_end(tokenizer: Any, text: str, ids: Sequence[int]) -> list[int]:
    """The end that a tokenizer has added to the tokens of a text; empty if it adds none."""
    end = [tokenizer.eos_token_id]
    bare = tokenizer(text, add_special_tokens=False).input_ids
    return end if bare and list(ids[-1:]) == end and list(bare[-1:]) != end else []


def without_added_end(tokenizer: Any, text: str, ids: Sequence[int]) -> list[int]:
    """The tokens of a text, which a tokenizer or its processor has made, without an end that it has
    added."""
    return list(ids[: len(ids) - len(added_end(tokenizer, text, ids))])
