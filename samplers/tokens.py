"""Drawing tokens with keyed noise. The sampler and the trainer warp logits by the same code.

n rows, v tokens of a vocabulary, b blocks of s tokens. argmax(p / E) with independent standard
exponential E is a draw from p (a race of exponentials; the "Gumbel-max trick" after a logarithm). A
token is drawn in two such races: a block by its mass W, then a token of it by p, with probability
W * p / W. That takes b + s numbers of noise, about twice the root of v, instead of v. They are a
counter-based hash of (row's key, position, place), so a completion depends neither on its batch nor
on the device that draws it.
"""

import math
from functools import cache

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

GOLDEN, FIRST, SECOND = (  # SplitMix64's constants, as signed numbers
    0x9E3779B97F4A7C15 - 2**64,
    0xBF58476D1CE4E5B9 - 2**64,
    0x94D049BB133111EB - 2**64,
)
WIDEST = 2**20  # numbers of a position: each position has so many counters
AHEAD = 2**22  # numbers that a GPU draws at once, in integers of 8 bytes
CACHED = 2**16  # numbers that a CPU draws at once: half a megabyte stays in its cache
UNEVENNESS = 8  # times that blocks may be smaller than the root of a vocabulary


def warp(
    logits: Float[Tensor, "*n v"], temperature: float, support: Bool[Tensor, "*n v"] | None = None
) -> Float[Tensor, "*n v"]:
    """Log-probabilities to sample from: at a temperature, over the tokens of `support`."""
    return warped(logits, temperature, support).log_softmax(-1)


def warped(
    logits: Float[Tensor, "*n v"], temperature: float, support: Bool[Tensor, "*n v"] | None = None
) -> Float[Tensor, "*n v"]:
    """`warp` before its softmax: logits in float32, -inf outside of `support`."""
    scaled = logits.float()
    if temperature != 1:
        scaled = scaled / temperature
    if support is not None:
        scaled = scaled.masked_fill(~support, -torch.inf)
    return scaled


def token_support(
    logp: Float[Tensor, "*n v"], top_p: float, top_k: int, min_p: float
) -> Bool[Tensor, "*n v"] | None:
    """Tokens that remain after top-k, then top-p, then min-p, in transformers' order; None for
    all. Log-probabilities may lack their normalization, as warped logits do.

    top_k  so many of the likeliest tokens, 0 for all; ties go to the lower token
    min_p  at least this share of the likeliest token's probability: arXiv:2407.01082
    """
    if top_p >= 1 and not top_k and not min_p:
        return None
    allowed = torch.ones_like(logp, dtype=torch.bool)
    if top_k:
        best = logp.sort(dim=-1, descending=True, stable=True)[1][..., :top_k]
        allowed = torch.zeros_like(allowed).scatter(-1, best, True)
    if top_p < 1:
        allowed &= nucleus(logp.masked_fill(~allowed, -torch.inf).log_softmax(-1), top_p)
    if min_p:
        allowed &= logp >= logp.amax(-1, keepdim=True) + math.log(min_p)
    return allowed


def nucleus(logp: Float[Tensor, "*n v"], top_p: float) -> Bool[Tensor, "*n v"]:
    """Smallest set of the likeliest tokens with total probability `top_p`: arXiv:1904.09751."""
    ordered, order = logp.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    return torch.zeros_like(logp, dtype=torch.bool).scatter(-1, order, before < top_p)


def entropy(logp: Float[Tensor, "*n v"]) -> Float[Tensor, "*n"]:
    """Entropy in nats; tokens that are not kept count as probability 0."""
    return -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)


def pack(mask: Bool[Tensor, "*n v"]) -> UInt8[Tensor, "*n bytes"]:
    """Pack a mask into bytes, eight tokens each, with the first in the lowest bit."""
    wide = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8))
    wide = wide.reshape(*wide.shape[:-1], wide.shape[-1] // 8, 8)
    return (wide.to(torch.uint8) << torch.arange(8, device=mask.device).to(torch.uint8)).sum(
        -1, dtype=torch.uint8
    )


def unpack(packed: UInt8[Tensor, "*n bytes"], vocabulary: int) -> Bool[Tensor, "*n v"]:
    bits = torch.arange(8, device=packed.device).to(torch.uint8)
    return ((packed[..., None] >> bits) & 1).flatten(-2)[..., :vocabulary].bool()


@cache
def blocks_of(vocabulary: int) -> tuple[int, int]:
    """Number of blocks of a vocabulary, and the tokens of each: the largest divisor up to the root.
    If that is UNEVENNESS times smaller, the root itself: then the last block is not full, which
    costs a copy of the probabilities. A seed's tokens depend on this choice.
    """
    root = math.isqrt(vocabulary)
    divisors = (size for size in range(root, root // UNEVENNESS, -1) if vocabulary % size == 0)
    size = next(divisors, root)
    return -(-vocabulary // size), size


def token_noise(
    rows: Int[Tensor, " n"], position: int, vocabulary: int, most: int = 1
) -> Float[Tensor, "p n _"]:
    """Standard exponential noise of b + s numbers for each row, at one position of its completion
    and at later ones, up to `most` in all: as many as the rows' device is glad to draw at once,
    since the kernels of a few numbers take as long to launch as those of many.

    SplitMix64 (Steele, Lea, Flood 2014) at counter position 2^20 + place + 1; 40 of its bits make
    an exponential variable. Small ones, which decide when an unlikely token is drawn, keep
    float32's relative precision down to 2^-41.
    """
    numbers = sum(blocks_of(vocabulary))
    assert numbers <= WIDEST, f"{numbers} numbers of a position are more than {WIDEST}"
    at_once = CACHED if rows.device.type == "cpu" else AHEAD
    count = max(1, min(most, at_once // max(1, len(rows) * numbers)))
    places = torch.arange(1, numbers + 1, device=rows.device)
    positions = torch.arange(position, position + count, device=rows.device)[:, None]
    return _exponential(rows[:, None] + ((places + positions * WIDEST) * GOLDEN)[:, None])


def draw_tokens(
    probabilities: Float[Tensor, "n v"], noise: Float[Tensor, "n _"]
) -> Int[Tensor, " n"]:
    """Draw a token of each row, whose probabilities need not sum to 1; tokens of probability 0 are
    never drawn. `noise`: of one position (`token_noise`)."""
    vocabulary = probabilities.shape[-1]
    count, size = blocks_of(vocabulary)
    if missing := count * size - vocabulary:
        probabilities = torch.nn.functional.pad(probabilities, (0, missing))
    blocks = probabilities.view(-1, count, size)
    block = (blocks.sum(-1) / noise[:, :count]).argmax(-1, keepdim=True)
    within = blocks.gather(1, block[..., None].expand(-1, 1, size))[:, 0]
    place = (within / noise[:, count:]).argmax(-1)
    return torch.add(place, block[:, 0], alpha=size)


def _exponential(counters: Tensor) -> Tensor:
    """Exponential noise of these counters, which are overwritten."""
    part = shifted_right(mixed_(counters), 24).float()
    # -(part + 0.5) / 2^40 in one pass: powers of two scale what is rounded, and round nothing
    torch.add(torch.tensor(-(2.0**-41)), part, alpha=-(2.0**-40), out=part)
    return part.clamp_(min=2.0**-24 - 1).log1p_().neg_()


def mixed_(z: Tensor) -> Tensor:
    """The finalizer of SplitMix64, in place."""
    z.bitwise_xor_(shifted_right(z, 30)).mul_(FIRST)
    z.bitwise_xor_(shifted_right(z, 27)).mul_(SECOND)
    return z.bitwise_xor_(shifted_right(z, 31))


def shifted_right(z: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros, where int64 would fill with the sign bit."""
    return (z >> bits).bitwise_and_(2 ** (64 - bits) - 1)
