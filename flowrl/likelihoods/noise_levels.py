"""Noise levels for matching losses: frozen settings that draw `count` sigmas from a generator.

All are stratified (one sigma from each of `count` parts), so that a few draws cover the range. They
do not exceed the plan's first sigma, the highest that the model was trained at (Wan .9997, SD1.5
.936). Sources: AWM's time types (arXiv:2509.25050) and DiffusionNFT's permuted grid
(arXiv:2509.16117).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import UserError
from flowrl.number_checks import check_number
from samplers.number_ranges import ABOVE_0_TO_1, FROM_0_BELOW_1, POSITIVE
from samplers.untyped import normal_quantiles


@runtime_checkable
class Times(Protocol):
    """Draws noise levels. `sigmas` are the plan's levels, without the final 0."""

    def __call__(
        self, sigmas: Sequence[float], count: int, rng: torch.Generator
    ) -> Float[Tensor, " count"]: ...


def shifted(t: Tensor, shift: float) -> Tensor:
    """Shift levels; towards noise if shift > 1: SD3's timestep shift (arXiv:2403.03206)."""
    return shift * t / (1 + (shift - 1) * t)


def _strata(count: int, rng: torch.Generator) -> Float[Tensor, " count"]:
    """One uniform number from each of `count` equal parts of 0..1, in random order."""
    t = (torch.arange(count) + torch.rand(count, generator=rng)) / count
    return t[torch.randperm(count, generator=rng)]


def _refuse_too_few(source: str, most: int, count: int) -> None:
    """UserError for levels of which only `most` per sample can be drawn, where `count` are
    wanted."""
    raise UserError(
        f"{source} has only {max(0, most)} levels to draw, not {count} per sample: "
        + (f"set levels_per_sample: {most} or lower, or raise steps" if most > 0 else "raise steps")
    )


@dataclass(frozen=True)
class Uniform:
    """Uniformly distributed levels: AWM (arXiv:2509.25050) uses low 0.2 and shift 3.

    sigma = shifted(low + (1 - low) u)

    low    lowest unshifted level, in [0, 1)
    shift  shift of the levels, above 0; above 1 favours high noise, 1 is none
    """

    low: float = 0.0
    shift: float = 1.0

    def __post_init__(self) -> None:
        check_number("Uniform's low", self.low, FROM_0_BELOW_1)
        check_number("Uniform's shift", self.shift, POSITIVE)

    def __call__(
        self, sigmas: Sequence[float], count: int, rng: torch.Generator
    ) -> Float[Tensor, " count"]:
        t = shifted(self.low + (1 - self.low) * _strata(count, rng), self.shift)
        return t.clamp(max=sigmas[0])


@dataclass(frozen=True)
class LogitNormal:
    """Logit-normal levels: AWM (arXiv:2509.25050) uses shift 3 and least 0.01.

        sigma = max(least, shifted(sigmoid(z))),  z ~ N(0, 1)

    AWM's code computes a clamp of the uniform number and then overwrites it; here the clamp is
    applied, so that no sigma is exactly 1.

    shift  shift of the levels, above 0; above 1 favours high noise, 1 is none
    least  lowest level, in [0, 1)
    """

    shift: float = 3.0
    least: float = 0.01

    def __post_init__(self) -> None:
        check_number("LogitNormal's shift", self.shift, POSITIVE)
        check_number("LogitNormal's least", self.least, FROM_0_BELOW_1)

    def __call__(
        self, sigmas: Sequence[float], count: int, rng: torch.Generator
    ) -> Float[Tensor, " count"]:
        z = normal_quantiles(_strata(count, rng).double().clamp(1e-6, 1 - 1e-6))
        return shifted(z.sigmoid(), self.shift).clamp(self.least, sigmas[0]).float()


@dataclass(frozen=True)
class Discrete:
    """Levels from the plan's own grid: AWM's discrete types (arXiv:2509.25050).

        sigma_j = grid[k],  k uniform in part j of `count` parts of the first `fraction`

    `init` sets the rule for index 0, pure noise: drawn like the others (`any`), never (`without`),
    or always, with count - 1 parts of the rest (`with`). UserError for too few levels.

    fraction  share of the levels, from the first on, that they are drawn from, in (0, 1]
    init      whether index 0 is drawn: `any`, `without` or `with`, as above
    """

    fraction: float = 0.9
    init: Literal["any", "with", "without"] = "any"

    def __post_init__(self) -> None:
        check_number("Discrete's fraction", self.fraction, ABOVE_0_TO_1)

    def __call__(
        self, sigmas: Sequence[float], count: int, rng: torch.Generator
    ) -> Float[Tensor, " count"]:
        return torch.tensor(sigmas)[self.indices(len(sigmas), count, rng)]

    def indices(self, steps: int, count: int, rng: torch.Generator) -> Tensor:
        first, parts = int(self.init != "any"), count - int(self.init == "with")
        end = int(steps * self.fraction + 1e-6)
        if end - first < parts:
            most = count - parts + max(0, end - first)
            _refuse_too_few("the plan's grid", most, count)
        edges = torch.linspace(first, end, parts + 1, dtype=torch.float64).add(1e-9).floor()
        width = edges.diff()
        index = edges[:-1] + (torch.rand(parts, generator=rng, dtype=torch.float64) * width).floor()
        if self.init == "with":
            index = torch.cat([torch.zeros(1, dtype=index.dtype), index])
        return index.long()[torch.randperm(count, generator=rng)]


@dataclass(frozen=True)
class PermutedGrid:
    """Distinct levels from the plan's own grid: DiffusionNFT (arXiv:2509.16117).

        sigma_j = grid[permutation[j]],  j < count

    Only the first `fraction` of the levels is permuted. UserError for too few levels.

    fraction  share of the levels, from the first on, that they are drawn from, in (0, 1]
    """

    fraction: float = 1.0

    def __post_init__(self) -> None:
        check_number("PermutedGrid's fraction", self.fraction, ABOVE_0_TO_1)

    def __call__(
        self, sigmas: Sequence[float], count: int, rng: torch.Generator
    ) -> Float[Tensor, " count"]:
        levels = int(len(sigmas) * self.fraction + 1e-6)
        if count > levels:
            _refuse_too_few("the plan", levels, count)
        return torch.tensor(sigmas)[torch.randperm(levels, generator=rng)[:count]]
