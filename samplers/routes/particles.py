"""Particles of Feynman-Kac steering (arXiv:2501.06848): their weights and resampling.

Weights are kept as logs, so no reward is too large. A reward that is not finite is ignored before
the end, and has weight 0 at the end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.noise import uniform
from samplers.number_ranges import ANY_NUMBER, AT_LEAST_0, FROM_0_TO_1

# (clean samples [n *d], row of the conditioning of each [n]) -> reward [n]
ParticleScore = Callable[[Tensor, Tensor], Tensor]


def effective(log_weights: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """The effective sample size 1 / sum w^2 of normalised weights, from 1 to k."""
    return 1 / normalised(log_weights).square().sum(-1)


def normalised(log_weights: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
    """Weights scaled to sum to 1, float64; equal weights if all are 0 (all logs -inf)."""
    none = (log_weights == -math.inf).all(-1, keepdim=True)
    return torch.where(none, 0.0, log_weights.double()).softmax(-1)


def systematic(
    log_weights: Float[Tensor, "n k"], u: Float[Tensor, " n"], count: int
) -> Int[Tensor, "n count"]:
    """Systematic resampling: `count` increasing indices per row in proportion to its weights, from
    one number in [0, 1) per row.

    Index i comes floor or ceil of count w_i times, and count w_i times on average: less variance
    than independent draws, and the same expectation.
    """
    upto = normalised(log_weights).cumsum(-1)
    upto = upto / upto[:, -1:]
    positions = (torch.arange(count, dtype=torch.float64) + u[:, None]) / count
    return torch.searchsorted(upto, positions.to(upto), right=True).clamp_max(upto.shape[1] - 1)


class Particles(NamedTuple):
    """State of n draws' k particles: all [n k], float64."""

    reward: Tensor  # the last one, their highest or their sum, by the potential
    spent: Tensor  # log of all potentials that a particle's line was weighed with
    log_weight: Tensor  # of the potentials since it was last resampled

    def take(self, index: Int[Tensor, "n k"], resampled: Tensor) -> "Particles":
        """Resample the rows where `resampled` [n 1] is true, and make their weights equal."""
        index = torch.where(resampled, index, torch.arange(index.shape[1], device=index.device))
        reward, spent, log_weight = (a.gather(1, index) for a in self)
        return Particles(reward, spent, torch.where(resampled, 0.0, log_weight))


@dataclass(frozen=True)
class FeynmanKac:
    """Settings of Feynman-Kac steering: when particles are weighted, and by what.

    Before each step of `at`, the potential of the reward r of the predicted clean sample is

        difference   exp(strength (r - r before))          max   exp(strength max of r so far)
        terminal     exp(strength r)                       sum   exp(c strength sum of r so far)

    and at the end exp(strength r) of the clean sample itself, divided by the product of the earlier
    potentials: whatever the potentials, the product along a particle's path is exp(strength r(x0)).

    With c = 1, as published, m sums tilt the particles by up to m (m + 1) / 2 times the strength
    before the end corrects it, which no affordable number of particles survives: with m = 4, both
    64 and 6,000 particles end at 1.6 to 1.8 for a mean of 1. So c = 2 / (m (m + 1)).

    ends_on    "potential" is the published code: max ends on the maximum and sum on the sum, with c
               = 1
    start      r before the first, any number: 0 as published, which is wrong for max with negative
               rewards, so None takes the first r
    adaptive   resample only where the effective sample size is below `threshold` of the particles.
               Unused weights are kept for the next time; the published code drops them and then
               misses its target with "difference"

    at         steps before which particles are weighted, from 0, increasing
    strength   weight of the reward in the exponent, at least 0; larger follows the reward more
               closely
    potential  how rewards of one path count: `difference`, `max`, `sum` or `terminal`, as above
    threshold  share of the particles below which the effective sample size must fall, in [0, 1]
    """

    at: tuple[int, ...]
    strength: float = 10.0
    potential: Literal["difference", "max", "sum", "terminal"] = "max"
    ends_on: Literal["reward", "potential"] = "reward"
    start: float | None = None
    adaptive: bool = True
    threshold: float = 0.5

    def __post_init__(self) -> None:
        AT_LEAST_0.check("FeynmanKac's strength", self.strength)
        ANY_NUMBER.check("FeynmanKac's start", self.start)
        FROM_0_TO_1.check("FeynmanKac's threshold", self.threshold)

    @property
    def _share(self) -> float:
        """The factor c on the strength of intermediate potentials."""
        times = len(self.at)
        if self.potential != "sum" or self.ends_on == "potential" or times == 0:
            return 1.0
        return 2 / (times * (times + 1))

    def begin(self, draws: int, particles: int) -> Particles:
        zero = torch.zeros(draws, particles, dtype=torch.float64)
        start = self.start
        if start is None:
            start = -math.inf if self.potential == "max" else 0.0
        return Particles(zero + start, zero, zero)

    def weigh(
        self, before: Particles, score: Float[Tensor, "n k"], last: bool = False
    ) -> Particles:
        """Update the particles with one more reward."""
        scored = score.isfinite()
        r = torch.where(scored, score.double(), before.reward)
        running = {
            "difference": r,
            "terminal": r,
            "max": torch.maximum(r, before.reward),
            "sum": torch.where(scored, r + before.reward, r),
        }[self.potential]
        if last:
            origin = self.start if self.start and self.potential == "difference" else 0.0
            ends = r if self.ends_on == "reward" else running
            log_g = self.strength * (ends - origin) - before.spent
            log_g = torch.where(scored, log_g, -math.inf)
        else:
            change = before.reward if self.potential == "difference" else 0.0
            strength = self.strength * self._share
            log_g = torch.where(scored, strength * (running - change), 0.0)
        return Particles(running, before.spent + log_g, before.log_weight + log_g)

    def draw(
        self, particles: Particles, keys: Sequence[tuple[int | str, ...]]
    ) -> tuple[Int[Tensor, "n k"], Particles]:
        """Resample: (parent of each particle, the new particles), with one key per draw."""
        n, k = particles.log_weight.shape
        few = effective(particles.log_weight) < self.threshold * k
        resampled = (few | (not self.adaptive))[:, None]
        index = systematic(particles.log_weight, uniform(keys), k)
        unmoved = torch.arange(k).expand(n, k)
        return torch.where(resampled, index, unmoved), particles.take(index, resampled)
