"""Process rewards: turns or steps of completions with rewards of their own, compared in a group."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl.credit.advantages import Standardize
from flowrl.credit.choices import Choices
from flowrl.credit.fitting import refuse_branches
from flowrl.credit.turns import ByTurn, turn_rewards
from flowrl.credit.values import (
    SAMPLE_TURNS,
    Context,
    Credit,
    Transform,
    existing,
)
from flowrl.number_checks import check_number
from samplers.number_ranges import AT_LEAST_0, FROM_0_TO_1, POSITIVE


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

    gamma        discount per turn, in [0, 1]; 1 counts all later turns equally
    outcome      whether the sample's score is a reward of its last turn
    information  rewards of what a turn adds to the answer's probability, {column: ..., before:
                 ...}; null: none
    """

    by_turn = True
    gamma: float = 1.0
    outcome: bool = True
    information: Information | None = None
    eps: float = 1e-4

    def __post_init__(self) -> None:
        check_number("GroupReturns's gamma", self.gamma, FROM_0_TO_1)
        check_number("GroupReturns's eps", self.eps, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        exists = context.needed(SAMPLE_TURNS, "GroupReturns").exists.cpu()
        credit, group = existing(credit, context), context.columns.group
        last = (torch.arange(exists.shape[1]) == exists.sum(1, keepdim=True) - 1)[..., None]
        reward = turn_rewards(credit, context) + credit.value * (last & self.outcome)
        rewarded = _scored(credit, context) | (last & self.outcome)
        rewarded = rewarded & credit.mask
        by_group = (-1, group * exists.shape[1], 1)
        value, mask = reward.reshape(by_group), rewarded.reshape(by_group)
        standardize = Standardize(correction=1, eps=self.eps)
        standardized = (standardize.rule(value, mask) * mask).view_as(reward)
        return credit._replace(value=_from_each_on(standardized, self.gamma) * credit.mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)


@dataclass(frozen=True)
class MinReturns:
    """Rewards of steps weighted towards the worst one, minus what other samples have per step: the
    min-form credit of PURE, arXiv:2504.15275.

        w_k = softmax_k(-reward_k / temperature),  r_k = w_k reward_k
        A_k = sum_{j >= k} (r_j - mean over the group's other samples of sum_j r_j / steps)

    As the temperature falls the sum of r approaches the smallest reward. With `outcome` the score,
    minus the mean of the group's others, belongs to the last step.

    temperature  softness of the minimum, in units of the rewards, above 0; smaller is nearer to it
    outcome      whether the sample's score belongs to its last step
    """

    by_turn = True
    temperature: float = 0.1
    outcome: bool = True

    def __post_init__(self) -> None:
        check_number("MinReturns's temperature", self.temperature, POSITIVE)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        exists = context.needed(SAMPLE_TURNS, "MinReturns").exists.cpu()
        credit, group = existing(credit, context), context.columns.group
        rewarded = _scored(credit, context) & credit.mask
        reward = turn_rewards(credit, context)
        cold = (-reward / self.temperature).masked_fill(~rewarded, -torch.inf)
        cold = cold - cold.amax(1, keepdim=True).clamp(min=torch.finfo(cold.dtype).min)
        weight = cold.exp()
        worst = reward * weight / weight.sum(1, keepdim=True).clamp(min=1)
        steps = rewarded.sum(1, keepdim=True)
        value = (
            worst - _of_others(worst.sum(1, keepdim=True) / steps, steps > 0, group)
        ) * rewarded
        if self.outcome:
            last = (torch.arange(exists.shape[1]) == exists.sum(1, keepdim=True) - 1)[..., None]
            score, scored = (credit.value * last).sum(1, keepdim=True), credit.mask.any(1, True)
            value = value + (score - _of_others(score, scored, group)) * last
        return credit._replace(value=_from_each_on(value, 1.0) * credit.mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)


def _of_others(value: Tensor, mask: Tensor, group: int) -> Tensor:
    """Mean of the group's other samples with a value [n 1 1]; the own value if there are none."""
    values, counted = (tensor.view(-1, group, 1) for tensor in (value.nan_to_num(0.0) * mask, mask))
    count = counted.sum(1, keepdim=True) - counted.long()
    mean = (values.sum(1, keepdim=True) - values) / count.clamp(min=1)
    return torch.where(count > 0, mean, values).view_as(value)


def _from_each_on(value: Tensor, gamma: float) -> Tensor:
    """Discounted sums over each turn and the later ones [n k 1]."""
    sums, later = list[Tensor](), torch.zeros_like(value[:, 0])
    for reward in reversed(value.unbind(1)):
        later = reward + gamma * later
        sums.insert(0, later)
    return torch.stack(sums, 1)


def _scored(credit: Credit, context: Context) -> Tensor:
    """Whether a turn has a reward of its own [n k 1]."""
    if context.intermediate is None:
        return torch.zeros_like(credit.mask)
    return context.intermediate.scored.cpu()


def compares_turns(transforms: Sequence[Transform]) -> bool:
    """Whether credit can differ between the turns or steps of a sample."""
    return any(isinstance(transform, ByTurn) and transform.by_turn for transform in transforms)


def information_of(transforms: Sequence[Transform]) -> Information | None:
    """The answer whose probability credit asks the policy for, if any."""
    informations = [t.information for t in transforms if isinstance(t, GroupReturns)]
    return next((asked for asked in informations if asked is not None), None)
