"""States of several tensors (a video and its sound) as one flat vector per sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from samplers.untyped import split_columns


@dataclass(frozen=True)
class Layout:
    """The parts of a flat state [n d], in order: their names, and the shape of each in one row.

    Kernels, stores and densities see the flat state. All parts move in one step and have its
    levels. Noise is keyed by sample and part, so that a part's does not depend on the others.
    A part that its model has at levels of its own is at the state's levels if its data is larger or
    smaller by a factor, which is in `data` (`samplers.part_levels`); empty where all are 1.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: tuple[float, ...] = ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(prod, self.shapes))

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @staticmethod
    def pack(parts: Sequence[Tensor]) -> Float[Tensor, "n d"]:
        return torch.cat([part.flatten(1) for part in parts], 1)

    def unpack(self, x: Float[Tensor, "n d"]) -> list[Tensor]:
        """The parts [n *shape] of flat states."""
        cut = zip(split_columns(x, self.sizes), self.shapes, strict=True)
        return [part.reshape(len(x), *shape) for part, shape in cut]

    def means(self, values: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
        """The mean of each part, one column per part."""
        return torch.stack([part.mean(1) for part in split_columns(values, self.sizes)], 1)
