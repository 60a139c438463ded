"""Advantage transforms that read lengths, turns, states or an external baseline.

Like the transforms of `flowrl.credit.advantages`, they map credit [n, k, r] to credit and honour
its mask. They read the `Context`, and raise an error that names a missing entry.

Without any transform of this file a trajectory's outcome is compared once and credited to all its
turns (AgentFlow's Flow-GRPO, arXiv:2510.05592): turns are decision points, and the column
SAMPLE_TURNS marks which of them a sample has. `Turns` compares each turn among the samples that
have it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from flowrl.credit.advantages import Standardize
from flowrl.credit.choices import Choices, image_plans, text_plans
from flowrl.credit.fitting import refuse_branches, refuse_untracked
from flowrl.credit.values import (
    NONE,
    REFERENCE,
    SAMPLE_TURNS,
    Context,
    Credit,
    NodeLevel,
    Transform,
    existing,
    masked_std,
    tracked,
)
from flowrl.errors import UserError
from flowrl.number_checks import check_number
from flowrl.table import Column
from samplers.number_ranges import AT_LEAST_0, AT_LEAST_2, FROM_0_TO_1

T = TypeVar("T")


def required(value: T | None, noun: str, reader: str) -> T:
    """Return the value. UserError if it is missing."""
    if value is None:
        raise UserError(f"{reader} needs {noun}, which this run does not have")
    return value


def _weighed(
    credit: Credit, weight: Tensor, rule: Callable[[Tensor, Tensor, Tensor], Tensor], group: int
) -> Credit:
    """Apply `rule(value, mask, weight)` to the leaves of each group, per decision point."""
    shape = (-1, group, credit.value.shape[-1])
    points: list[Tensor] = []
    for value, mask in zip(credit.value.unbind(1), credit.mask.unbind(1), strict=True):
        weights = weight.view(-1, group, 1).expand(-1, -1, shape[-1])
        value, mask = value.reshape(shape), mask.reshape(shape)
        points.append((rule(value, mask, weights) * mask).reshape(-1, shape[-1]))
    return credit._replace(value=torch.stack(points, 1))


@dataclass(frozen=True)
class LengthBaseline:
    """Values minus the group's mean weighted by length: OPO (arXiv:2505.23585).

        A_i = value_i - sum_j length_j value_j / sum_j length_j

    It has the least variance if a sample's gradient grows with its length.
    """

    def __call__(self, credit: Credit, context: Context) -> Credit:
        def rule(value: Tensor, mask: Tensor, length: Tensor) -> Tensor:
            weight = length * mask
            total = weight.sum(1, keepdim=True).clamp(min=1)
            centred = value - (weight * value).sum(1, keepdim=True) / total
            return torch.where(masked_std(value, mask, 1, 0) > 0, centred, 0.0)

        lengths = required(context.lengths, "lengths", "LengthBaseline").double().cpu()
        return _weighed(credit, lengths, rule, context.columns.group)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)


@dataclass(frozen=True)
class WhitenTokens:
    """Values whitened over all tokens of the batch: REINFORCE++ (arXiv:2501.03262).

        A = (value - mean) / sqrt(variance + eps)

    A sample weighs as much as its length, divided among its decision points. After the group's mean
    is subtracted, this is the paper's variant with a baseline.

    eps  added to the variance, at least 0
    """

    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_number("WhitenTokens's eps", self.eps, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        lengths = required(context.lengths, "lengths", "WhitenTokens").double().cpu()
        value, mask = credit
        weight = lengths[:, None, None] / mask.sum(1, keepdim=True).clamp(min=1) * mask
        total = weight.sum((0, 1), keepdim=True)
        mean = (weight * value).sum((0, 1), keepdim=True) / total.clamp(min=1)
        square = (weight * (value - mean).square()).sum((0, 1), keepdim=True)
        variance = square / (total - 1).clamp(min=1)
        flat = variance.sqrt() <= NONE * (value * mask).abs().amax((0, 1), keepdim=True)
        white = torch.where(flat, 0.0, (value - mean) / (variance + self.eps).sqrt())
        return credit._replace(value=white * mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)


@dataclass(frozen=True)
class Baseline:
    """Values minus the prompt's expected score: single-stream credit (arXiv:2509.13232).

        A_i = value_i - baseline(draw of i)

    A tracker sets the baseline of each draw. Samples of a draw whose baseline is NaN are masked.
    """

    def __call__(self, credit: Credit, context: Context) -> Credit:
        baseline = (
            required(tracked(context).baseline, "a baseline of each draw", "Baseline")
            .double()
            .cpu()
        )
        expected = baseline.repeat_interleave(context.columns.group)[:, None, None]
        mask = credit.mask & expected.isfinite()
        return Credit((credit.value - expected.nan_to_num(0.0)) * mask, mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices) or refuse_untracked(self, choices)


@dataclass(frozen=True)
class GreedyBaseline:
    """Values minus the score of the draw's greedy sample: ReMax (arXiv:2310.10505).

        A_i = value_i - value_greedy

    A plan with `greedy` makes it the draw's last sample, which is masked. If it has no score, the
    whole draw is masked. `samples` counts the samples of a draw, the greedy one included: a group
    may hold several draws of a prompt.

    samples  samples of a draw, the greedy one included, at least 2
    """

    samples: int

    def __post_init__(self) -> None:
        check_number("GreedyBaseline's samples", self.samples, AT_LEAST_2)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        shape = (-1, self.samples, *credit.value.shape[1:])
        value, mask = (part.reshape(shape) for part in credit)
        sampled = mask & mask[:, -1:]
        sampled[:, -1] = False
        centred = (value - value[:, -1:]) * sampled
        return Credit(centred.flatten(0, 1), sampled.flatten(0, 1))

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)


@dataclass(frozen=True)
class Penalize:
    """A KL penalty towards the initial model as part of the reward, instead of the loss.

        value <- value - weight sum_t log(p_t / p_start_t)

    The sum is over the whole sample, treated as one action (RLOO, arXiv:2402.14740; ReMax,
    arXiv:2310.10505). With `each` every token has its own sum, over itself and the tokens after it
    (REINFORCE++, arXiv:2501.03262): credit then has one column per token, masked where the token is
    not the model's, and transforms that compare samples must come before.

    weight  weight of the penalty in the reward, above 0; larger keeps the policy nearer to the
            initial one
    each    whether each token has its own sum; else a sample has one
    """

    weight: float
    each: bool = False

    reads: ClassVar[tuple[Column[Any], ...]] = (REFERENCE,)

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise UserError(
                f"the weight of a KL penalty in the reward must be above 0, not {self.weight}: "
                "leave the penalty out"
            )

    def __call__(self, credit: Credit, context: Context) -> Credit:
        reference = context.needed(REFERENCE, "Penalize")
        moved = reference.log_ratios.double().cpu()
        later = moved.nan_to_num(0.0).flip(1).cumsum(1).flip(1)[..., None]
        if not self.each:
            return credit._replace(value=(credit.value - self.weight * later[:, :1]) * credit.mask)
        points = reference.points.cpu()[..., None].expand(-1, -1, credit.value.shape[-1])
        value, mask = (part.gather(1, points) for part in existing(credit, context))
        mask = mask & ~moved.isnan()[..., None]
        return Credit((value - self.weight * later) * mask, mask)

    def refuses(self, choices: Choices) -> str | None:
        if image_plans(choices):
            return (
                "Penalize sums log-probabilities of tokens, which images do not have: use an "
                "Anchor in the loss"
            )
        if any(plan.cuts or plan.forking is not None for plan in text_plans(choices)):
            return (
                "Penalize subtracts a completion's divergence from its own reward, but "
                "completions of a tree share tokens: use an Anchor in the loss"
            )
        return None


def turn_rewards(credit: Credit, context: Context) -> Tensor:
    """Rewards of single turns or steps [n k 1], 0 where there is no reward."""
    if context.intermediate is None:
        return torch.zeros_like(credit.value[..., :1])
    if credit.value.shape[-1] != 1:
        raise UserError(
            "rewards of turns are added to the sum of a sample's rewards: put this transform "
            "behind sum"
        )
    return context.intermediate.values.cpu().double() * context.intermediate.scored.cpu()


@runtime_checkable
class ByTurn(Protocol):
    """A transform whose credit can differ between the turns or steps of a sample."""

    @property
    def by_turn(self) -> bool: ...


@dataclass(frozen=True)
class Turns:
    """Compares each turn among the samples that have it: AT-GRPO (arXiv:2510.11062).

        value_k <- value_k + reward of turn k,  mask <- mask and exists

    Later transforms then compare turn k only among samples with a turn k. Rewards of turns come
    from the environment; the outcome is the team reward of that paper.
    """

    by_turn = True

    def __call__(self, credit: Credit, context: Context) -> Credit:
        context.needed(SAMPLE_TURNS, "Turns")
        value, mask = existing(credit, context)
        return Credit((value + turn_rewards(credit, context)) * mask, mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)


@dataclass(frozen=True)
class Discount:
    """Return of each turn: the rewards from that turn on, discounted once per turn
    (arXiv:2510.01051).

    value_k <- gamma^(turns after k) value_k + sum_{j >= k} gamma^(j - k) reward_j

    The outcome is a reward of the last turn; reward_j come from the environment.

    gamma  discount per turn, in [0, 1]; 1 counts all later turns equally
    """

    by_turn = True
    gamma: float = 0.95

    def __post_init__(self) -> None:
        check_number("Discount's gamma", self.gamma, FROM_0_TO_1)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        credit = existing(credit, context)
        later = credit.mask.double().flip(1).cumsum(1).flip(1) - 1
        value = credit.value * self.gamma ** later.clamp(min=0)
        if context.intermediate is not None:
            returns, total = list[Tensor](), torch.zeros_like(value[:, 0])
            for reward in reversed(turn_rewards(credit, context).unbind(1)):
                total = reward + self.gamma * total
                returns.insert(0, total)
            value = value + torch.stack(returns, 1)
        return credit._replace(value=value * credit.mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)


@dataclass(frozen=True)
class States:
    """The group's advantage plus an advantage among decisions in the same state: GiGPO.

        A = (value - group mean) + weight (return - mean of returns in the same state of the draw)

    arXiv:2505.10978. Value is the outcome plus all rewards of turns; returns are those of
    `Discount` with `gamma`, in any turn. A state with a single decision adds 0. `scale` divides
    both parts by their std (the published code does not divide).

    weight  weight of the comparison within a state, at least 0
    gamma   discount per turn of its returns, in [0, 1]
    scale   whether both parts are divided by their std
    """

    by_turn = True
    weight: float = 1.0
    gamma: float = 0.95
    scale: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_number("States's weight", self.weight, AT_LEAST_0)
        check_number("States's gamma", self.gamma, FROM_0_TO_1)
        check_number("States's eps", self.eps, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        states = context.needed(SAMPLE_TURNS, "States").states.cpu()
        scale = "group" if self.scale else None
        rule = Standardize(scale, correction=1, eps=self.eps)
        rewards = (turn_rewards(credit, context) * credit.mask).sum(1, keepdim=True)
        episode = rule(Credit((credit.value + rewards) * credit.mask, credit.mask), context).value
        credit = existing(credit, context)
        returns = Discount(self.gamma)(credit, context).value
        n, k, r = credit.value.shape
        level = NodeLevel.of(states.flatten(), context.columns.group * k)
        value, mask = returns.flatten(0, 1), credit.mask.flatten(0, 1)
        count = level.at_leaves(level.total(mask.double()))
        mean = level.at_leaves(level.total(value * mask)) / count.clamp(min=1)
        square = level.at_leaves(level.total((value - mean).square() * mask))
        std = (square / (count - 1).clamp(min=1)).sqrt()
        size = level.at_leaves(level.most(value.abs()))
        step = torch.where(std > NONE * size, value - mean, 0.0)
        if self.scale:
            step = step / (std + self.eps)
        total = episode + self.weight * step.view(n, k, r)
        return credit._replace(value=total * credit.mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_branches(self, choices)


def greedy_baselines(transforms: Sequence[Transform]) -> list[int]:
    """Greedy samples per draw that each `GreedyBaseline` among the transforms needs."""
    return [transform.samples for transform in transforms if isinstance(transform, GreedyBaseline)]
