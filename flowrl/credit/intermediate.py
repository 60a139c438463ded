"""Scores of intermediate states, as credit reads them.

n samples, k steps, r rewards. V_k is the score of the clean sample predicted from the state before
step k, V_T the score of the sample itself. A step is masked where a score that it needs is missing.
A transform that reads them says so (`ReadsIntermediate`), and stands before `Sum` unless it adds
to a credit that is already summed.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.credit.choices import Choices, image_plans, samples_itself, text_plans
from flowrl.credit.values import (
    Context,
    Credit,
    Transform,
)
from flowrl.errors import UserError
from rewards.types import IntermediateScores


class StateValues(NamedTuple):
    """V_0 to V_T of each sample, 0 where unknown. `noisy` [k]: steps that involve a decision."""

    value: Float[Tensor, "n k+1 r"]
    mask: Bool[Tensor, "n k+1 r"]
    noisy: tuple[bool, ...]


def needed_intermediate(context: Context) -> IntermediateScores:
    """Scores of intermediate states. UserError without any: `refuse_intermediate` excludes plans
    that do not ask for them."""
    if context.intermediate is None:
        raise UserError(
            "this credit reads intermediate scores, which the samples do not have: use a plan with "
            "intermediate rewards (samplers.Looking)"
        )
    return context.intermediate


def state_values(credit: Credit, context: Context) -> StateValues:
    """Intermediate scores, followed by the samples' own scores.

    A state before a step without noise has the value of the next one, unless it has a score: the
    ODE is deterministic.
    """
    intermediate = needed_intermediate(context)
    scores, scored = intermediate.values.cpu(), intermediate.scored.cpu()
    noisy = context.columns.noisy
    value, mask = credit.value[:, -1], credit.mask[:, -1]
    values, masks = [value], [mask]
    for k in reversed(range(scores.shape[1])):
        score, has_score = scores[:, k].double(), scored[:, k]
        if not noisy[k]:
            score, has_score = torch.where(has_score, score, value), has_score | mask
        value, mask = score * has_score, has_score
        values.insert(0, value)
        masks.insert(0, mask)
    return StateValues(torch.stack(values, 1), torch.stack(masks, 1), noisy)


def refuse_intermediate(choices: Choices, chains: bool) -> str | None:
    """Refuse plans without intermediate rewards, and branching plans if credit needs `chains`."""
    plans = image_plans(choices)
    if not samples_itself(choices):
        return "steer: particles are not credited by step: leave steer out of this recipe"
    if text_plans(choices) or any("seen" not in plan.route.asks for plan in plans):
        return (
            "this credit reads intermediate scores: use a plan with intermediate rewards "
            "(samplers.Looking)"
        )
    if any(not any(step.train for step in plan.steps) for plan in plans):
        return "this credit is per step, but the plan trains on no step: use Chain or Window"
    if chains and any(set(plan.nodes) != {plan.group} for plan in plans):
        return (
            "this credit compares a sample with its own intermediate states: use a plan "
            "without branches"
        )
    return None


def gained(credit: Credit, context: Context, relative: bool = True) -> Credit:
    """Reward gained in each step, V_{k+1} - V_k; without `relative` V_{k+1} alone. Steps without
    noise are masked."""
    value, of_states, noisy = state_values(credit, context)
    mask = credit.mask & of_states[:, 1:] & torch.tensor(noisy)[:, None]
    gain = value[:, 1:]
    if relative:
        mask, gain = mask & of_states[:, :-1], gain - value[:, :-1]
    return Credit(gain * mask, mask)


@runtime_checkable
class ReadsIntermediate(Protocol):
    """A transform that reads scores of intermediate states.

    other_rewards  whether these may be of other rewards than the samples' own
    """

    @property
    def other_rewards(self) -> bool: ...


def reads_intermediate(transforms: Sequence[Transform]) -> bool:
    """Whether credit reads intermediate scores."""
    return any(isinstance(transform, ReadsIntermediate) for transform in transforms)


def differs_between_steps(transforms: Sequence[Transform]) -> bool:
    """Whether credit allows intermediate rewards that differ from the samples' rewards."""
    return all(
        transform.other_rewards
        for transform in transforms
        if isinstance(transform, ReadsIntermediate)
    )
