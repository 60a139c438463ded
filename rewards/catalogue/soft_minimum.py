"""Smooth minimum of several rewards.

score = -T log( mean_i exp(-s_i / T) ) over the members i: the minimum for T -> 0, the mean for T ->
infinity, and s if all members are s. A gain in the worst member is worth more than the same gain in
a better one: the weight of member i in the gradient is softmax(-s / T)_i.

Members must have the same scale, as in `ensemble`. A sample that a member could not score is
unscored; members that abstain from a sample are left out of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.catalogue.ensemble import joined_members
from rewards.types import Positive, Reward, RewardScores, Samples


@dataclass(frozen=True)
class SoftMinimum:
    rewards: tuple[Reward, ...]
    temperature: float
    concurrent: ClassVar[bool] = True

    @property
    def parts(self) -> Mapping[str, Reward]:
        return {f"member {i}": reward for i, reward in enumerate(self.rewards)}

    def __call__(self, samples: Samples) -> Float[Tensor, " n"] | RewardScores:
        return joined_members(self.rewards, samples, self._joined).plain

    def _joined(self, members: Float[Tensor, "m n"]) -> Float[Tensor, " n"]:
        total = torch.logsumexp(-members / self.temperature, 0) - math.log(len(members))
        return -self.temperature * total


def load(rewards: Sequence[Reward], temperature: Positive = 0.1) -> Reward:
    """Load the reward.

    rewards      members, two or more, whose scores have the same scale
    temperature  width of the minimum in units of the members' scores, above 0; smaller is nearer to
                 the minimum, larger to the mean
    """
    if len(rewards) < 2:
        raise ValueError(f"soft_minimum: at least two rewards are needed, not {len(rewards)}")
    return SoftMinimum(tuple(rewards), temperature)
