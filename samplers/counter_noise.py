"""Standard normal noise that a device draws itself, with the same bits on every device.

Element i of a row is a function of the row's key and i alone: SplitMix64 (Steele, Lea, Flood 2014)
makes 64 bits of both, and each half of them a normal number, by a table of quantiles whose steps
are 1/256 of an octave. All operations are of integers, or a single product or sum of float32, which
IEEE 754 rounds alike everywhere; a logarithm or a cosine would differ between devices.
"""

from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.host import uploaded
from samplers.tokens import GOLDEN, mixed_, shifted_right
from samplers.untyped import normal_quantiles

OCTAVES, STEPS = 33, 256  # of the numbers 1 to 2^32 that stand for probabilities up to 1/2
FINE = 2**15  # places within a step: a float32 has 23 digits behind its first, 8 of them the step's
DRAWN = 2**22  # numbers that are drawn at once, since their integers take 8 bytes each


def counter_normal(
    keys: Int[Tensor, " n"], shape: tuple[int, ...], device: str | torch.device
) -> Float[Tensor, "n *d"]:
    """Noise of `shape` for each key (`samplers.noise.row_keys`), float32."""
    size = torch.Size(shape).numel()
    rows: Any = uploaded(keys, device)
    positions = torch.arange(1, (size + 1) // 2 + 1, device=device) * GOLDEN
    blocks = [
        _normals(mixed_(part[:, None] + positions))[:, :size]
        for part in rows.split(max(1, DRAWN // max(1, size)))
    ]
    return torch.cat(blocks).view(len(keys), *shape)


def _normals(bits: Int[Tensor, "n m"]) -> Float[Tensor, "n k"]:
    """Two normal numbers of each 64 bits, side by side: 31 bits of a half are the probability of a
    tail, and the last is the sign."""
    halves = torch.stack([shifted_right(bits, 32), bits & 0xFFFFFFFF], 2).flatten(1)
    odd = ((halves >> 1) * 2 + 1).float()  # of 2^33: a tail's probability, in (0, 1/2]
    code = odd.view(torch.int32)
    first = 127 * STEPS  # the step of 1.0
    step, within = (code >> 15) - first, (code & (FINE - 1)).float()
    start, slope = (uploaded(column, bits.device) for column in _table())
    size = start[step] + slope[step] * within
    return size * (1 - 2 * (halves & 1)).float()


@cache
def _table() -> tuple[Float[Tensor, " c"], Float[Tensor, " c"]]:
    """The quantile at the start of each step, and its change per place within it."""
    octave = 2.0 ** torch.arange(OCTAVES, dtype=torch.float64)
    within = 1 + torch.arange(STEPS, dtype=torch.float64) / STEPS
    edges = torch.cat([(octave[:, None] * within).flatten(), 2 * octave[-1:]])
    size = -normal_quantiles((edges / 2.0**33).clamp(max=0.5))
    return size[:-1].float(), (size.diff() / FINE).float()
