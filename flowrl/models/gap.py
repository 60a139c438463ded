"""Differences between log-probabilities of one sample, from two places that compute them."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Gap:
    """Absolute differences of log-probabilities, in nats."""

    mean: float
    high: float  # the 90 % quantile

    @classmethod
    def of(cls, differences: Float[Tensor, " n"]) -> "Gap":
        """Summarise n differences; 0 if there are none."""
        off = differences.abs().double()
        if len(off) == 0:
            return cls(0.0, 0.0)
        return cls(float(off.mean()), float(off.quantile(0.9)))

    def or_more(self, other: "Gap") -> "Gap":
        return Gap(max(self.mean, other.mean), max(self.high, other.high))

    def within(self, noise: "Gap", times: float) -> bool:
        """False also for a difference that is not a number."""
        return self.mean <= times * noise.mean and self.high <= times * noise.high

    def __str__(self) -> str:
        return f"{self.mean:.1e} on average and {self.high:.1e} at the 90 % quantile"
