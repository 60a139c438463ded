"""A reward that counts only for samples that pass another reward.

score = reward(x) if where(x) >= above else floor; unscored where `where` is unscored. The reward is
not called for samples that do not pass, which saves calls of an expensive reward; a groupwise
reward compares those that pass.

    {name: gate, reward: {name: pickscore}, where: {name: ocr, kind: strict}, above: 1, floor: 0}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.combine import scored
from rewards.types import Reward, Samples


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

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        known = scored("where", self.where, samples)
        found = torch.full_like(known, self.floor).masked_fill(known.isnan(), torch.nan)
        passed = torch.nonzero(known >= self.above).flatten()
        if len(passed) > 0:
            found[passed] = scored("reward", self.reward, samples.take(passed))
        return found


def load(reward: Reward, where: Reward, above: float = 0.5, floor: float = 0.0) -> Reward:
    return Gate(reward, where, above, floor)
