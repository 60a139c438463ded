"""Several rewards combined into one that is harder to fool.

mean      the mean of the members
worst     the lowest member
cautious  mean - k * standard deviation over members (correction 0): samples on which they disagree
          score less. arXiv:2310.02743 compares the three, with the variance in place of the
          deviation

Members must have the same scale; `clipped` with `unit: true` maps a member to 0..1. A sample that
any member could not score is unscored.

    {name: ensemble, kind: worst, rewards: [{name: clipped, reward: pickscore, ...}, ...]}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.combine import scored
from rewards.types import Reward, Samples

EnsembleKind = Literal["mean", "worst", "cautious"]


@dataclass(frozen=True)
class Ensemble:
    rewards: tuple[Reward, ...]
    kind: EnsembleKind
    k: float
    concurrent: ClassVar[bool] = True

    @property
    def parts(self) -> Mapping[str, Reward]:
        return {f"member {i}": reward for i, reward in enumerate(self.rewards)}

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        members = member_scores(self.rewards, samples)
        if self.kind == "worst":
            return members.amin(0)  # NaN passes through
        mean = members.mean(0)
        return mean if self.kind == "mean" else mean - self.k * members.std(0, correction=0)


def member_scores(rewards: Sequence[Reward], samples: Samples) -> Float[Tensor, "r n"]:
    """Scores of the members, one row each."""
    return torch.stack([scored(f"member {i}", r, samples) for i, r in enumerate(rewards)])


def load(rewards: Sequence[Reward], kind: EnsembleKind = "mean", k: float = 1.0) -> Reward:
    if len(rewards) < 2:
        raise ValueError(f"ensemble: at least two rewards are needed, not {len(rewards)}")
    if not k >= 0:
        raise ValueError(f"ensemble: k must be at least 0, not {k}")
    return Ensemble(tuple(rewards), kind, k)
