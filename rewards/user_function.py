"""A user's own reward: a plain function of a file that the YAML names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rewards.types import Samples


@dataclass(frozen=True)
class Own:
    """`function(samples, **settings)`, which gives n scores: a tensor, or a list with None in it.

    shows   the file's function `examples`, if it has one: two samples, the better one first
    """

    function: Callable[..., Tensor | Sequence[float | None] | None]
    settings: Mapping[str, Any]
    shows: Callable[[], Samples] | None = None

    def __call__(self, samples: Samples) -> Any:
        return self.function(samples, **self.settings)

    def examples(self) -> Samples | None:
        return self.shows() if self.shows is not None else None
