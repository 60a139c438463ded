"""Several rewards as one that is harder to fool: a sample must please all of them.

mean      the mean of the members
worst     the least of them
cautious  mean - k * standard deviation over members (correction 0): what they disagree on counts
          less. arXiv:2310.02743 compares the three, with the variance in place of the deviation

Members must be on one scale; `clipped` with `unit: true` brings one to 0..1. A sample that any
member could not score is unscored.

    {name: ensemble, kind: worst, rewards: [{name: clipped, reward: pickscore, ...}, ...]}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
    """One row a member."""
    return torch.stack([scored(f"member {i}", r, samples) for i, r in enumerate(rewards)])


def load(rewards: Sequence[Reward], kind: EnsembleKind = "mean", k: float = 1.0) -> Reward:
    if len(rewards) < 2:
        raise ValueError(f"ensemble: an ensemble has two rewards or more, not {len(rewards)}")
    if not k >= 0:
        raise ValueError(f"ensemble: k must be 0 or more, not {k}")
    return Ensemble(tuple(rewards), kind, k)
