"""Process rewards: turns or steps of completions with rewards of their own, compared in a group."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.credit.turns import Discount, States, Turns, WhitenTurns, given, turn_rewards
from flowrl.credit.values import Context, Credit, Transform, existing, masked_mean, masked_std


@dataclass(frozen=True)
class Information:
    """Rewards turns or steps by what they add to the probability of the right answer: IGPO,
    arXiv:2510.14967. The policy that samples is asked; see
    `flowrl.models.language.steps.information_gains`.

    column  of the prompt file, with the answer
    before  text between the transcript and the answer
    """

    column: str
    before: str = ""


@dataclass(frozen=True)
class GroupReturns:
    """Rewards of turns or steps standardised within the group, then summed from each on.

        z_k = (reward_k - mean) / (std + eps),  A_k = sum_{j >= k} gamma^(j - k) z_j

    Mean and std are over all rewards of the group's turns: GRPO with process supervision,
    arXiv:2402.03300 (4.1.3), with gamma 1; IGPO, arXiv:2510.14967. With `outcome` the score of the
    sample is a reward of its last turn. A turn without a reward adds none. The std divides by
    n - 1. `information` adds IGPO's rewards.
    """

    gamma: float = 1.0
    outcome: bool = True
    information: Information | None = None
    eps: float = 1e-4

    def __call__(self, credit: Credit, context: Context) -> Credit:
        exists = given(context.turns, "turns or steps of samples", "GroupReturns").exists.cpu()
        credit, group = existing(credit, context), context.columns.group
        last = (torch.arange(exists.shape[1]) == exists.sum(1, keepdim=True) - 1)[..., None]
        reward = turn_rewards(credit, context) + credit.value * (last & self.outcome)
        known = _scored(credit, context) | (last & self.outcome)
        known = known & credit.mask
        by_group = (-1, group * exists.shape[1], 1)
        value, mask = reward.reshape(by_group), known.reshape(by_group)
        std = masked_std(value, mask, 1, 1)
        centred = (value - masked_mean(value, mask, 1)) * mask
        rest = torch.where(std > 0, centred / (std + self.eps), 0.0).view_as(reward)
        parts, later = list[Tensor](), torch.zeros_like(rest[:, 0])
        for each in reversed(rest.unbind(1)):
            later = each + self.gamma * later
            parts.insert(0, later)
        return credit._replace(value=torch.stack(parts, 1) * credit.mask)


def _scored(credit: Credit, context: Context) -> Tensor:
    """Whether a turn has a reward of its own [n k 1]."""
    if context.intermediate is None:
        return torch.zeros_like(credit.mask)
    return context.intermediate.scored.cpu()


def compares_turns(transforms: Sequence[Transform]) -> bool:
    """Whether credit can differ between the turns or steps of a sample."""
    kinds = Turns | Discount | States | WhitenTurns | GroupReturns
    return any(isinstance(each, kinds) for each in transforms)


def information_of(transforms: Sequence[Transform]) -> Information | None:
    """The answer whose probability credit asks the policy for, if any."""
    asked = [each.information for each in transforms if isinstance(each, GroupReturns)]
    return next((each for each in asked if each is not None), None)
