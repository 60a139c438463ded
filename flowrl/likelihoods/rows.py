"""Training rows: what one optimizer step is taken on.

b rows, t entries a row: one for images and videos, one a token for text. `*d`: the latent's dims.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from samplers import Kernel

T = TypeVar("T")


class Evaluation(NamedTuple):
    """A policy's say on b rows. `out` is a mean, a velocity, or None where nobody needs it."""

    logp: Float[Tensor, "b t"]
    out: Tensor | None


@dataclass(frozen=True)
class Rows:
    """Rows are never dropped, only masked: every process holds the same number of them."""

    prompt: Int[Tensor, " b"]  # row of the batch's conditioning
    advantage: Float[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]  # False: not in the loss, nor in its denominator
    old: Evaluation | None  # the behaviour policy's say; None until the update asks for it


@dataclass(frozen=True)
class TransitionRows(Rows):
    """Stored noisy steps x -> x_next of one step of a plan."""

    x: Float[Tensor, "b *d"]
    x_next: Float[Tensor, "b *d"]
    sigma: Float[Tensor, " b"]
    sigma_next: Float[Tensor, " b"]
    kernel: Kernel


@dataclass(frozen=True)
class MatchingRows(Rows):
    """Clean samples with fresh noise: x = (1 - sigma) x0 + sigma noise."""

    x: Float[Tensor, "b *d"]
    sigma: Float[Tensor, " b"]
    x0: Float[Tensor, "b *d"]
    noise: Float[Tensor, "b *d"]


@dataclass(frozen=True)
class TokenRows(Rows):
    """Completions of prompts that the policy holds: row `prompt` of its batch.

    `mask` holds the tokens in the loss, the stop tokens among them. Positions of at least `ends`
    are padding: entries there are 0. `lengths` counts the model's own tokens.
    """

    ids: Int[Tensor, "b t"]
    lengths: Int[Tensor, " b"]
    temperature: float
    kept: UInt8[Tensor, "b t bytes"] | None  # tokens that the sampler's top-p left; None: all
    sampled: Float[Tensor, "b t"] | None = None  # another engine's log-probs; None: the same model
    told: Bool[Tensor, "b t"] | None = None  # tokens of an environment, context only; None: none

    @property
    def ends(self) -> Int[Tensor, " b"]:
        """Tokens of each, whoever wrote them."""
        return self.lengths if self.told is None else self.lengths + self.told.sum(1)

    @property
    def written(self) -> Bool[Tensor, "b t"]:
        """Positions that hold a token of the model."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        whole = places < self.ends[:, None]
        return whole if self.told is None else whole & ~self.told


def without_old(chunk: Rows) -> Rows:
    """The rows without the sampler's log-probabilities, so that the trainer computes them. Tokens
    keep them as `sampled`, like those of another engine: the difference is logged."""
    if chunk.old is not None and isinstance(chunk, TokenRows) and chunk.sampled is None:
        return replace(chunk, old=None, sampled=chunk.old.logp)
    return replace(chunk, old=None)


def sampled_elsewhere(rows: Rows) -> Float[Tensor, "b t"] | None:
    """Log-probabilities by the sampler, where the trainer computes `old` itself."""
    return rows.sampled if isinstance(rows, TokenRows) else None


def stacked(parts: Sequence[T]) -> T:
    """Rows of one kind behind one another; what is not a tensor is the first's."""

    def join(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Tensor):
            return torch.cat(list(values))
        if isinstance(values[0], Evaluation):
            return Evaluation(*(join(part) for part in zip(*values, strict=True)))
        return values[0]

    first = parts[0]
    assert is_dataclass(first) and not isinstance(first, type)
    names = [f.name for f in fields(first)]
    return replace(first, **{name: join([getattr(p, name) for p in parts]) for name in names})


def trimmed(rows: Rows, unit: int) -> Rows:
    """Without the units of neighbouring rows that no entry of is in the loss: they add nothing to
    it, nor to its denominators."""
    some = rows.mask.any(1).view(-1, unit).any(1).repeat_interleave(unit)
    return rows if bool(some.all()) else take(rows, some.nonzero()[:, 0])


def take(rows: T, index: Int[Tensor, " m"]) -> T:
    """Rows `index` of every tensor in `rows`; what is not a tensor stays as it is."""

    def pick(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[index]
        if isinstance(value, Evaluation):
            return Evaluation(*(pick(part) for part in value))
        return value

    assert is_dataclass(rows) and not isinstance(rows, type)
    return replace(rows, **{f.name: pick(getattr(rows, f.name)) for f in fields(rows)})
