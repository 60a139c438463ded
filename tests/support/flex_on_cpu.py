"""A stand-in for FlexAttention, which has no gradient on a CPU: the same mask, written out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    **unused: Any,
) -> Tensor:
    """Attention [n heads q d] whose mask [q k] is that of a BlockMask, if there is one. Rows that
    see nothing are 0, as FlexAttention returns them."""
    assert score_mod is None and not unused.get("enable_gqa"), "no tiny network asks for these"
    attention = torch.nn.functional.scaled_dot_product_attention
    if block_mask is None:
        return attention(query, key, value, scale=scale)
    seen = flex.create_mask(
        block_mask.mask_mod, 1, 1, query.shape[2], key.shape[2], device=query.device
    )
    blind = ~seen.any(-1, keepdim=True)
    out = attention(query, key, value, attn_mask=seen | blind, scale=scale)
    return out.masked_fill(blind, 0)


@contextmanager
def flex_on_cpu() -> Iterator[None]:
    with patch.object(flex, "flex_attention", dense):
        yield
