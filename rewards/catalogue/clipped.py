"""A reward kept within bounds: score = min(max(reward(x), low), high).

An upper bound removes the gain from fooling a model into scores far above those of good samples.
With `unit` the result is (score - low) / (high - low), in 0..1, so that rewards of different scales
can be combined. It abstains where the reward does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from rewards.combine import reward_scores
from rewards.types import Reward, RewardScores, Samples


@dataclass(frozen=True)
class Clipped:
    reward: Reward
    low: float
    high: float
    unit: bool
    concurrent: ClassVar[bool] = True

    @property
    def parts(self) -> Mapping[str, Reward]:
        return {"reward": self.reward}

    def __call__(self, samples: Samples) -> Float[Tensor, " n"] | RewardScores:
        return reward_scores("reward", self.reward, samples).mapped(self._within).plain

    def _within(self, scores: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        clamped = scores.clamp(self.low, self.high)
        return (clamped - self.low) / (self.high - self.low) if self.unit else clamped


def load(
    reward: Reward,
    low: float = float("-inf"),
    high: float = float("inf"),
    unit: bool = False,
) -> Reward:
    """Load the reward.

    reward  reward whose scores are bounded
    low     any number below `high`: lower scores are raised to it; -.inf is no bound
    high    any number above `low`: higher scores are lowered to it; .inf is no bound
    unit    whether scores are then mapped to 0..1, (score - low) / (high - low); needs both bounds
    """
    if not low < high:
        raise ValueError(f"clipped: low must be below high, not {low} and {high}")
    if unit and abs(low) + abs(high) == float("inf"):
        raise ValueError("clipped: unit needs both low and high")
    return Clipped(reward, low, high, unit)
