"""Several rewards combined into one that is harder to fool.

mean      the mean of the members
worst     the lowest member
cautious  mean - k * standard deviation over members (correction 0): samples on which they disagree
          score less. arXiv:2310.02743 compares the three, with the variance in place of the
          deviation

Members must have the same scale; `clipped` with `unit: true` maps a member to 0..1. A sample that
a member could not score is unscored. Members that abstain from a sample are left out of it.

    {name: ensemble, kind: worst, rewards: [{name: clipped, reward: pickscore, ...}, ...]}
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.combine import reward_scores
from rewards.types import NotNegative, Reward, RewardScores, Samples

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

    def __call__(self, samples: Samples) -> Float[Tensor, " n"] | RewardScores:
        return joined_members(self.rewards, samples, self._joined).plain

    def _joined(self, members: Float[Tensor, "m n"]) -> Float[Tensor, " n"]:
        if self.kind == "worst":
            return members.amin(0)  # NaN passes through
        mean = members.mean(0)
        return mean if self.kind == "mean" else mean - self.k * members.std(0, correction=0)


def joined_members(
    rewards: Sequence[Reward],
    samples: Samples,
    join: Callable[[Float[Tensor, "m n"]], Float[Tensor, " n"]],
) -> RewardScores:
    """Join the scores of the members that apply to each sample; it abstains where none does.

    Samples to which the same members apply are joined together.
    """
    members = [reward_scores(f"member {i}", reward, samples) for i, reward in enumerate(rewards)]
    values = torch.stack([scores.values for scores in members])
    applies = torch.stack([scores.applies for scores in members], 1)
    joined_scores = RewardScores.nowhere(len(samples.prompts))
    for pattern in dict.fromkeys(map(tuple, applies.tolist())):
        asked = torch.tensor(pattern)
        if bool(asked.any()):
            rows = (applies == asked).all(1).nonzero()[:, 0]
            joined = join(values[asked][:, rows])
            joined_scores.put(rows, RewardScores(joined, torch.ones(len(rows), dtype=torch.bool)))
    return joined_scores


def load(rewards: Sequence[Reward], kind: EnsembleKind = "mean", k: NotNegative = 1.0) -> Reward:
    """Load the reward.

    rewards  members, two or more, whose scores have the same scale
    kind     mean of the members, the worst of them, or cautious: their mean minus k standard
             deviations over members
    k        standard deviations that `cautious` subtracts, at least 0; larger scores samples lower
             on which members disagree; no effect with another kind
    """
    if len(rewards) < 2:
        raise ValueError(f"ensemble: at least two rewards are needed, not {len(rewards)}")
    return Ensemble(tuple(rewards), kind, k)
