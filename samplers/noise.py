"""Noise keyed by its purpose, not by the process or batch that draws it.

Every draw of random numbers has a key: integers and words that name its purpose, such as
(seed, iteration, draw, "step", plan, step, node). A sample is then the same whatever the batch, the
order of the prompts or the number of processes, so a run can be split, resumed and compared.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.counter_noise import counter_normal
from samplers.host import uploaded
from samplers.layout import Layout

NoiseKind = Literal["generator", "counter"]


def key_hash(*key: int | str) -> int:
    """64-bit hash of the key; similar keys give unrelated numbers."""
    plain = tuple(k if isinstance(k, str) else int(k) for k in key)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by `key_hash(*key)`."""
    return torch.Generator().manual_seed(key_hash(*key))


def row_keys(keys: Sequence[tuple[int | str, ...]]) -> Int[Tensor, " n"]:
    """A 64-bit number per key, on the CPU."""
    signed = [n - 2**64 if n >= 2**63 else n for n in (key_hash(*key) for key in keys)]
    return torch.tensor(signed, dtype=torch.int64)


def normal(keys: Sequence[tuple[int | str, ...]], shape: tuple[int, ...]) -> Float[Tensor, "n *d"]:
    """Standard normal noise of `shape`, one tensor per key: float32, on the CPU."""
    rows = torch.empty(len(keys), *shape)
    for row, key in zip(rows, keys, strict=True):
        row.normal_(generator=generator(*key))
    return rows


def keyed_noise(
    kind: NoiseKind,
    keys: Sequence[tuple[int | str, ...]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str | torch.device,
    layout: Layout | None = None,
) -> Float[Tensor, "n *d"]:
    """Standard normal noise of `shape`, one tensor per key, on a device: drawn on the CPU by
    torch's generator and copied there, or drawn there by a counter. With a layout each part has
    noise of its own, with the part's name behind the key."""
    if layout is not None:
        of = zip(layout.names, layout.shapes, strict=True)
        parts = [([(*key, name) for key in keys], part) for name, part in of]
        return layout.pack(
            [keyed_noise(kind, of_part, part, dtype, device) for of_part, part in parts]
        )
    if kind == "generator":
        return uploaded(normal(keys, shape).to(dtype), device)
    return counter_normal(row_keys(keys), shape, device).to(dtype)


def cpu_noise(
    keys: Sequence[tuple[int | str, ...]], shape: tuple[int, ...], layout: Layout | None
) -> Float[Tensor, "n *d"]:
    """`keyed_noise` of torch's generator, on the CPU in float32."""
    return keyed_noise("generator", keys, shape, torch.float32, "cpu", layout)


def uniform(keys: Sequence[tuple[int | str, ...]]) -> Float[Tensor, " n"]:
    """A number in [0, 1) for each key: float64, on the CPU."""
    rows = [torch.rand((), generator=generator(*key), dtype=torch.float64) for key in keys]
    return torch.stack(rows) if rows else torch.empty(0, dtype=torch.float64)
