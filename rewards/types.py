"""The contracts: samples in, one number a sample out. n samples, r rewards, p pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Kind = Literal["image", "video", "text"]


@dataclass(frozen=True)
class Samples:
    """n decoded samples. Samples of one group are contiguous.

    media   images [n 3 h w] or videos [n f 3 h w], floats in 0..1; or n tensors [3 h w] or
            [f 3 h w] of any sizes; or n strings. An entry of a sequence that is None could not be
            read: `score_all` leaves it out, so that no reward sees it
    group   an id a sample; the same prompt drawn twice is two groups
    meta    the other columns of the prompt file, one mapping a sample; or nothing
    """

    media: Any
    prompts: Sequence[str]
    group: Int[Tensor, " n"]
    meta: Sequence[Mapping[str, Any]] = field(default=())

    def __post_init__(self) -> None:
        n = len(self.prompts)
        counts = {"media": len(self.media), "group": len(self.group), "meta": len(self.meta)}
        if not self.meta:
            counts.pop("meta")
        for name, count in counts.items():
            if count != n:
                raise ValueError(f"Samples: {n} prompts but {count} {name}; give one a sample")

    @property
    def kind(self) -> Kind:
        """What the media are. ValueError if they are nothing that can be scored, or of two kinds.

        Of no samples at all it is "image", as of an empty tensor.
        """
        if isinstance(self.media, Tensor):
            return _kind(self.media[0] if len(self.media) else torch.empty(self.media.shape[1:]))
        readable = [item for item in self.media if item is not None]
        kinds = {_kind(item) for item in readable}
        if len(kinds) > 1:
            raise ValueError(f"Samples: {' and '.join(sorted(kinds))} in one batch; part them")
        return _kind(readable[0]) if readable else "image"

    def take(self, rows: Sequence[int] | Int[Tensor, " m"]) -> "Samples":
        """The samples of these rows, in this order; groups keep their ids."""
        at = rows.tolist() if isinstance(rows, Tensor) else [int(row) for row in rows]
        index = torch.tensor(at, dtype=torch.long)
        media = (
            self.media[index.to(self.media.device)]
            if isinstance(self.media, Tensor)
            else [self.media[i] for i in at]
        )
        meta = [self.meta[i] for i in at] if self.meta else ()
        group = self.group[index.to(self.group.device)]
        return Samples(media, [self.prompts[i] for i in at], group, meta)


def _kind(item: Any) -> Kind:
    if isinstance(item, str):
        return "text"
    if isinstance(item, Tensor) and item.is_floating_point() and item.ndim in (3, 4):
        if item.shape[-3] == 3:
            return "image" if item.ndim == 3 else "video"
    what = (
        f"a tensor of shape {list(item.shape)} and {item.dtype}"
        if isinstance(item, Tensor)
        else type(item).__name__
    )
    raise ValueError(
        f"Samples: a sample is a float image [3 h w], a video [f 3 h w] or a string, not {what}"
    )


@runtime_checkable
class Reward(Protocol):
    """Higher is better. NaN says that this reward cannot score the sample: it is then left out.

    Pointwise rewards ignore `samples.group`; groupwise ones compare inside it. Scores are float
    numbers on the CPU, without gradient.
    """

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]: ...


@runtime_checkable
class Judge(Protocol):
    """P(sample a is preferred to sample b), for pairs given as rows of `samples`.

    NaN says that there is no verdict: the pair is then left out.
    """

    def __call__(
        self, samples: Samples, a: Int[Tensor, " p"], b: Int[Tensor, " p"]
    ) -> Float[Tensor, " p"]: ...


@dataclass(frozen=True)
class Scores:
    """What the rewards gave, one column a reward. `values` is 0 where `scored` is False."""

    values: Float[Tensor, "n r"]
    scored: Bool[Tensor, "n r"]
    names: tuple[str, ...]

    @property
    def unscored(self) -> dict[str, int]:
        """How many samples each reward could not score."""
        missing = (~self.scored).sum(0).tolist()
        return dict(zip(self.names, missing, strict=True))
