"""Noise keyed by its purpose, not by the process or batch that draws it.

Every draw of random numbers has a key: integers and words that name its purpose, such as
(seed, iteration, draw, "step", plan, step, node). A sample is then the same whatever the batch, the
order of the prompts or the number of processes, so a run can be split, resumed and compared.
"""

import hashlib
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def key_hash(*key: int | str) -> int:
    """64-bit hash of the key; similar keys give unrelated numbers."""
    plain = tuple(k if isinstance(k, str) else int(k) for k in key)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by `key_hash(*key)`."""
    return torch.Generator().manual_seed(key_hash(*key))


def normal(keys: Sequence[tuple[int | str, ...]], shape: tuple[int, ...]) -> Float[Tensor, "n *d"]:
    """Standard normal noise of `shape`, one tensor per key: float32, on the CPU."""
    rows = torch.empty(len(keys), *shape)
    for row, key in zip(rows, keys, strict=True):
        row.normal_(generator=generator(*key))
    return rows


def uniform(keys: Sequence[tuple[int | str, ...]]) -> Float[Tensor, " n"]:
    """A number in [0, 1) for each key: float64, on the CPU."""
    rows = [torch.rand((), generator=generator(*key), dtype=torch.float64) for key in keys]
    return torch.stack(rows) if rows else torch.empty(0, dtype=torch.float64)
