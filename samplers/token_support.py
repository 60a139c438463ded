"""The tokens that top-p, top-k and min-p kept, in memory that grows with their number.

A bit per vocabulary entry takes 19 kB per token at 152,000 entries, and most nuclei hold a few
tokens. v entries of the vocabulary, p numbers in the pool, m positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from samplers.host import derived, on_host, sent
from samplers.tokens import pack, unpack
from samplers.untyped import distinct_numbers

WORD = 4  # bytes of a number in the pool


@dataclass(frozen=True)
class TokenSupport:
    """Sets of tokens at positions of any shape. A position refers to a part of the pool: the ids
    of its tokens or, where that is shorter, a bit per vocabulary entry.

    starts  place of the position's first number in `pool`
    counts  tokens of the position; if negative, minus the number of 32-bit words that hold bits; 0
            where no token was drawn
    pool    numbers that positions refer to, shared by selections and by leaves with a common trunk
    """

    starts: Int[Tensor, "*n"]
    counts: Int[Tensor, "*n"]
    pool: Int[Tensor, " p"]

    @classmethod
    def of(cls, mask: Bool[Tensor, "m v"]) -> "TokenSupport":
        """Store the true entries of each row, in 4 min(count, v / 32) + 12 bytes."""
        sizes = mask.sum(-1)
        bits = pack(mask)
        bits = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % WORD))
        words = bits.view(torch.int32)
        wide = sizes > words.shape[-1]
        entries = mask[~wide].nonzero()[:, 1].int()
        ids, dense = sizes[~wide], int(wide.sum())
        starts = torch.empty_like(sizes)
        starts[~wide] = ids.cumsum(0) - ids
        indices = torch.arange(dense, device=mask.device)
        starts[wide] = len(entries) + indices * words.shape[-1]
        counts = torch.where(wide, -words.shape[-1], sizes).int()
        return cls(starts, counts, torch.cat([entries, words[wide].flatten()]))

    def mask(self, vocabulary: int) -> Bool[Tensor, "*n v"]:
        """The sets as the boolean mask from which they were stored."""
        starts, counts = self.starts.flatten(), on_host(self.counts).flatten().long()
        allowed = torch.zeros(len(starts), vocabulary, dtype=torch.bool, device=starts.device)
        row, offset = (sent(part, starts.device) for part in _spread(counts.clamp(min=0)))
        allowed[row, self.pool[starts[row] + offset].long()] = True
        wide = (counts < 0).nonzero()[:, 0]
        if len(wide):
            words = torch.arange(-int(counts[wide[0]]), device=starts.device)
            wide = sent(wide, starts.device)
            bits = self.pool[starts[wide, None] + words].view(torch.uint8)
            allowed[wide] = unpack(bits, vocabulary)
        return allowed.view(*self.starts.shape, vocabulary)

    def __getitem__(self, index: int | Tensor | slice | tuple[Tensor, ...]) -> "TokenSupport":
        if isinstance(index, int | slice):

            def selected(part: Tensor) -> Tensor:
                return part[index]

            return self.mapped(lambda part: derived(selected, part))
        at = (index,) if isinstance(index, Tensor) else index
        return self.mapped(lambda part: derived(_entries, part, *at))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "TokenSupport":
        """Apply a function to the positions of all sets. Zeros that it adds represent empty
        sets."""
        return replace(self, starts=change(self.starts), counts=change(self.counts))

    @classmethod
    def none(cls, like: Tensor) -> "TokenSupport":
        """Empty sets at every position of a tensor."""
        starts = torch.zeros_like(like, dtype=torch.int64)
        return cls(starts, starts.int(), starts.new_empty(0, dtype=torch.int32))

    def put(self, cells: tuple[Tensor, ...], new: "TokenSupport") -> "TokenSupport":
        """Replace the sets at these positions."""
        mine, new = with_one_pool([self, new])
        starts = mine.starts.index_put(cells, new.starts)
        return TokenSupport(starts, mine.counts.index_put(cells, new.counts), new.pool)

    def within(self, grown: "TokenSupport | None") -> "TokenSupport":
        """The same sets in the pool of `grown`, so that nothing is stored twice. `grown` was made
        from these by selecting positions and by `put`, so its pool begins with theirs."""
        assert grown is not None and len(grown.pool) >= len(self.pool)
        return replace(self, pool=grown.pool)

    def only(self, chosen: Bool[Tensor, "*n"]) -> "TokenSupport":
        """Drop all other positions, and pool entries that nothing refers to any more."""
        masked = self.mapped(lambda part: part.masked_fill(~chosen, 0))
        used = masked.counts != 0
        starts, inverse = distinct_numbers(masked.starts[used])
        sizes = torch.empty_like(starts)
        sizes[inverse] = masked.counts[used].abs().long()
        row, offset = _spread(sizes)
        moved = (sizes.cumsum(0) - sizes)[inverse]
        new = torch.zeros_like(masked.starts).index_put((used,), moved)
        return TokenSupport(new, masked.counts, self.pool[starts[row] + offset])

    def to(self, device: str | torch.device) -> "TokenSupport":
        return TokenSupport(*(sent(part, device) for part in (self.starts, self.counts, self.pool)))

    @property
    def device(self) -> torch.device:
        return self.counts.device

    @property
    def memory(self) -> int:
        """Bytes of all tensors, including the pool."""
        tensors = self.starts, self.counts, self.pool
        return sum(part.numel() * part.element_size() for part in tensors)


def with_one_pool(parts: Sequence[TokenSupport]) -> list[TokenSupport]:
    """Move several sets into one pool. Parts that already share a pool stay as they are."""
    pools = {id(part.pool): part.pool for part in parts}
    if len(pools) == 1:
        return list(parts)
    whole, first = torch.cat(list(pools.values())), dict[int, int]()
    end = 0
    for key, pool in pools.items():
        first[key], end = end, end + len(pool)
    return [TokenSupport(p.starts + first[id(p.pool)], p.counts, whole) for p in parts]


def joined_kept(
    parts: Sequence[TokenSupport], join: Callable[[list[Tensor]], Tensor] = torch.cat
) -> TokenSupport:
    """Join the positions of several parts with `torch.cat` or another tensor function."""
    same = with_one_pool(parts)
    starts, counts = join([part.starts for part in same]), join([part.counts for part in same])
    return TokenSupport(starts, counts, same[0].pool)


def joined_column(parts: Sequence[Any], join: Callable[[list[Tensor]], Tensor] = torch.cat) -> Any:
    """Join tensors or sets of tokens; None if one of the parts is None."""
    if any(part is None for part in parts):
        return None
    is_support = isinstance(parts[0], TokenSupport)
    return joined_kept(parts, join) if is_support else join(list(parts))


def _entries(part: Tensor, *at: Tensor) -> Tensor:
    return part[at]


def _spread(sizes: Int[Tensor, " m"]) -> tuple[Int[Tensor, " s"], Int[Tensor, " s"]]:
    """The row of each of sum(sizes) entries, and its index in the row."""
    row = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    return row, torch.arange(len(row), device=sizes.device) - (sizes.cumsum(0) - sizes)[row]
