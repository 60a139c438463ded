"""The contracts: samples in, one number a sample out. n samples, r rewards, p pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """n decoded samples. Samples of one group are contiguous.

    media   images [n 3 h w] or videos [n f 3 h w], floats in 0..1, or n strings
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


@runtime_checkable
class Reward(Protocol):
    """Higher is better. NaN says that this reward cannot score the sample: it is then left out.

    Pointwise rewards ignore `samples.group`; groupwise ones compare inside it.
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
