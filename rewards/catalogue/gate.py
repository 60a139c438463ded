"""A reward that counts only for samples that pass another reward.

score = reward(x) if where(x) >= above else floor; unscored where `where` is unscored. It abstains
where `where` does, and where the reward does behind it. The reward is not called for samples that
do not pass, which saves calls of an expensive reward; a groupwise reward compares those that pass.

    {name: gate, reward: {name: pickscore}, where: {name: ocr, kind: strict}, above: 1, floor: 0}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.combine import reward_scores
from rewards.types import Finite, Reward, RewardScores, Samples


@dataclass(frozen=True)
class Gate:
    reward: Reward
    where: Reward
    above: float
    floor: float
    concurrent: ClassVar[bool] = True

    @property
    def parts(self) -> Mapping[str, Reward]:
        return {"reward": self.reward, "where": self.where}

    def __call__(self, samples: Samples) -> Float[Tensor, " n"] | RewardScores:
        values, applies = reward_scores("where", self.where, samples)
        floor = torch.full_like(values, self.floor).masked_fill(values.isnan(), torch.nan)
        scores = RewardScores(floor, applies)
        passed = torch.nonzero(values >= self.above).flatten()
        if len(passed) > 0:
            scores.put(passed, reward_scores("reward", self.reward, samples.take(passed)))
        return scores.plain


def load(reward: Reward, where: Reward, above: Finite = 0.5, floor: Finite = 0.0) -> Reward:
    """Load the reward.

    reward  reward of the samples that pass; it is not called for others
    where   reward that decides which samples pass
    above   score of `where` from which a sample passes, any number
    floor   score of samples that do not pass, any number; put it below the scores of those that do
    """
    return Gate(reward, where, above, floor)
