"""Drawing tokens with keyed noise. The sampler and the trainer warp logits by the same code.

n rows, v tokens of a vocabulary. A token is argmax(log p + Gumbel noise), which is a draw from p
(Gumbel 1954; the "Gumbel-max trick"). The noise is a counter-based hash of (row's key, position,
token), so a completion depends neither on its batch nor on the device that draws it.
"""

import math

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

GOLDEN, FIRST, SECOND = (  # SplitMix64's constants, as signed numbers
    0x9E3779B97F4A7C15 - 2**64,
    0xBF58476D1CE4E5B9 - 2**64,
    0x94D049BB133111EB - 2**64,
)
WIDEST = 2**20  # tokens of a vocabulary: each position has so many counters
AHEAD = 2**22  # numbers that a GPU draws at once, in integers of 8 bytes
CACHED = 2**16  # counters that are worked on at once on a CPU: half a megabyte stays in its cache


def warp(
    logits: Float[Tensor, "*n v"], temperature: float, support: Bool[Tensor, "*n v"] | None = None
) -> Float[Tensor, "*n v"]:
    """Log-probabilities to sample from: at a temperature, over the tokens of `support`."""
    scaled = logits.float()
    if temperature != 1:
        scaled = scaled / temperature
    if support is not None:
        scaled = scaled.masked_fill(~support, -torch.inf)
    return scaled.log_softmax(-1)


def token_support(
    logp: Float[Tensor, "*n v"], top_p: float, top_k: int, min_p: float
) -> Bool[Tensor, "*n v"] | None:
    """Tokens that remain after top-k, then top-p, then min-p, in transformers' order; None for
    all.

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


def gumbel(
    rows: Int[Tensor, " n"], position: int, vocabulary: int
) -> Float[Tensor, "n {vocabulary}"]:
    """Standard Gumbel noise for each row at one position of its completion, on the rows' device.

    SplitMix64 (Steele, Lea, Flood 2014) at counter position 2^20 + token + 1; 40 of its bits make
    an exponential variable, and the Gumbel is minus its logarithm. Small exponentials, which decide
    when an unlikely token is drawn, keep float32's relative precision down to 2^-41.
    """
    counters = _counters(position, 1, vocabulary, rows.device)[0]
    size = max(1, CACHED // vocabulary) if rows.device.type == "cpu" else max(len(rows), 1)
    return torch.cat([_gumbel(part[:, None] + counters) for part in torch.split(rows, size)])


def gumbel_ahead(
    rows: Int[Tensor, " n"], position: int, most: int, vocabulary: int
) -> Float[Tensor, "p n {vocabulary}"]:
    """`gumbel` at this position and at later ones, up to `most` in all: so many as a GPU is glad to
    draw at once, since it would wait for the host at each; on a CPU one."""
    if rows.device.type == "cpu":
        return gumbel(rows, position, vocabulary)[None]
    count = max(1, min(most, AHEAD // max(1, len(rows) * vocabulary)))
    return _gumbel(rows[:, None] + _counters(position, count, vocabulary, rows.device)[:, None])


def _counters(
    position: int, count: int, vocabulary: int, device: torch.device
) -> Int[Tensor, "{count} {vocabulary}"]:
    assert vocabulary <= WIDEST, f"a vocabulary of {vocabulary} is more than {WIDEST}"
    tokens = torch.arange(1, vocabulary + 1, device=device)
    indices = torch.arange(position, position + count, device=device)[:, None]
    return (tokens + indices * WIDEST) * GOLDEN


def _gumbel(counters: Tensor) -> Tensor:
    """Gumbel noise of these counters, which are overwritten."""
    part = shifted_right(mixed_(counters), 24).float()
    # -(part + 0.5) / 2^40 in one pass: powers of two scale what is rounded, and round nothing
    torch.add(torch.tensor(-(2.0**-41)), part, alpha=-(2.0**-40), out=part)
    return part.clamp_(min=2.0**-24 - 1).log1p_().neg_().log_().neg_()


def mixed_(z: Tensor) -> Tensor:
    """The finalizer of SplitMix64, in place."""
    z.bitwise_xor_(shifted_right(z, 30)).mul_(FIRST)
    z.bitwise_xor_(shifted_right(z, 27)).mul_(SECOND)
    return z.bitwise_xor_(shifted_right(z, 31))


def shifted_right(z: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros, where int64 would fill with the sign bit."""
    return (z >> bits).bitwise_and_(2 ** (64 - bits) - 1)
