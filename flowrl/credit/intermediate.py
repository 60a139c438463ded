"""Credit from intermediate scores: the gain of each step of a trajectory.

n samples, k steps, r rewards. V_k is the score of the clean sample predicted from the state before
step k, V_T the score of the sample itself. A step is masked where a score that it needs is missing.
Transforms that read intermediate scores stand before `Sum`, except `Potential`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.credit.choices import Choices, image_plans, samples_itself, text_plans
from flowrl.credit.values import (
    Context,
    Credit,
    Transform,
    applying,
    by_column,
    masked_mean,
    masked_std,
)
from flowrl.errors import UserError
from rewards.types import IntermediateScores


class StateValues(NamedTuple):
    """V_0 to V_T of each sample, 0 where unknown. `noisy` [k]: steps that involve a decision."""

    value: Float[Tensor, "n k+1 r"]
    known: Bool[Tensor, "n k+1 r"]
    noisy: tuple[bool, ...]


def _intermediate(context: Context) -> IntermediateScores:
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
    intermediate = _intermediate(context)
    scores, scored = intermediate.values.cpu(), intermediate.scored.cpu()
    noisy = context.columns.noisy
    value, known = credit.value[:, -1], credit.mask[:, -1]
    values, knowns = [value], [known]
    for k in reversed(range(scores.shape[1])):
        here, there = scores[:, k].double(), scored[:, k]
        if not noisy[k]:
            here, there = torch.where(there, here, value), there | known
        value, known = here * there, there
        values.insert(0, value)
        knowns.insert(0, known)
    return StateValues(torch.stack(values, 1), torch.stack(knowns, 1), noisy)


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


def _standard(credit: Credit, context: Context, eps: float) -> Tensor:
    """Values minus their group's mean at each step, divided by its std; 0 if all are equal."""

    def rule(value: Tensor, mask: Tensor) -> Tensor:
        std = masked_std(value, mask, 1, 0)
        return torch.where(std > 0, (value - masked_mean(value, mask, 1)) / (std + eps), 0.0)

    return by_column(credit, context, rule).value


@dataclass(frozen=True)
class StepGain:
    """Reward gained in each step: DenseGRPO (arXiv:2601.20218).

        value_k = V_{k+1} - V_k

    Gains add up to the sample's score minus the score of its noise. A step without noise is masked.
    With `relative` False the value is V_{k+1} alone, the paper's weaker baseline.
    """

    relative: bool = True

    def __call__(self, credit: Credit, context: Context) -> Credit:
        value, known, noisy = state_values(credit, context)
        mask = credit.mask & known[:, 1:] & torch.tensor(noisy)[:, None]
        gain = value[:, 1:]
        if self.relative:
            mask, gain = mask & known[:, :-1], gain - value[:, :-1]
        return Credit(gain * mask, mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_intermediate(choices, chains=False)


@dataclass(frozen=True)
class TurningPoint:
    """Credit for the steps after which a trajectory moves towards its final reward:
    TurningPoint-GRPO (arXiv:2602.06422).

        d_i = R_i - R_{i-1}, c_i = sign(d_i) sign(R_n - R_0), turn_i = c_i > 0 and not c_{i-1} > 0

    R_i is the score after i of the n noisy steps; c_{i-1} must be below 0, except at the first
    step, which turns if c_1 > 0. Signs refer to the weighted sum of the rewards.

    form      paper     d_i, but R_n - R_{i-1} where step i turns
              released  R_n - R_0 + bonus d_i where step i turns (in all released configurations)
    strict    a turn also needs sign(d_i) = sign(R_n - R_i), which excludes the last step
    balanced  keeps as many turns with d_i > 0 as with d_i < 0 in the batch, of largest |d_i|
    """

    form: Literal["paper", "released"] = "released"
    bonus: float = 1.0
    strict: bool = False
    balanced: bool = False

    def __call__(self, credit: Credit, context: Context) -> Credit:
        value, known, noisy = state_values(credit, context)
        deciding = [k for k, drawn in enumerate(noisy) if drawn]
        steps = torch.tensor(deciding, dtype=torch.long)
        before, after, end = value[:, steps], value[:, steps + 1], value[:, -1:]
        # a turn reads the whole trajectory, and all rewards that apply have a part in its signs
        whole = known[:, [*deciding, -1]].all(1, keepdim=True)
        abstained = ~applying(credit, context).any(1, keepdim=True)
        whole = (whole | abstained).all(-1, keepdim=True) & whole.any(-1, keepdim=True)
        weights = context.weights.to(value)
        turn = self.turns(before @ weights, after @ weights, end @ weights, whole[..., 0])
        if self.form == "paper":
            worth = torch.where(turn[..., None], end - before, after - before)
        else:
            worth = end - before[:, :1] + self.bonus * turn[..., None] * (after - before)
        mask = torch.zeros_like(credit.mask)
        mask[:, steps] = credit.mask[:, steps] & whole
        return Credit(torch.zeros_like(credit.value).index_copy(1, steps, worth) * mask, mask)

    def turns(
        self,
        before: Float[Tensor, "n i"],
        after: Float[Tensor, "n i"],
        end: Float[Tensor, "n 1"],
        known: Bool[Tensor, "n 1"],
    ) -> Bool[Tensor, "n i"]:
        """Steps at which trajectories turn, from weighted sums of rewards."""
        gain = after - before
        toward = gain.sign() * (end - before[:, :1]).sign()
        last = torch.cat([torch.full_like(toward[:, :1], -1.0), toward[:, :-1]], 1)
        turn = (toward > 0) & (last < 0) & known
        if self.strict:
            turn = turn & (gain.sign() == (end - after).sign())
        if not self.balanced:
            return turn
        ways = [turn & (gain * sign > 0) for sign in (1, -1)]
        most = min(int(way.sum()) for way in ways)
        size = gain.abs().flatten()
        kept = torch.zeros_like(size, dtype=torch.bool)
        for way in ways:
            order = size.masked_fill(~way.flatten(), -1.0).argsort(descending=True, stable=True)
            kept[order[:most]] = True
        return kept.view_as(turn)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_intermediate(choices, chains=True)


@dataclass(frozen=True)
class Discounted:
    """Discounted sum of the scores after a step: VGPO (arXiv:2512.12387), according to reviews.

        Q_k = sum_{j >= k} gamma^(j - k) V_{j+1},  over the noisy steps j

    A trajectory is masked where one of its scores is missing.
    """

    gamma: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise UserError(f"the discount must be in [0, 1], not {self.gamma}")

    def __call__(self, credit: Credit, context: Context) -> Credit:
        value, known, noisy = state_values(credit, context)
        drawn = torch.tensor(noisy)
        whole = known[:, 1:][:, drawn].all(1, keepdim=True)
        total, parts = torch.zeros_like(value[:, 0]), list[Tensor]()
        for k in reversed(range(len(noisy))):
            total = value[:, k + 1] + self.gamma * total if noisy[k] else total
            parts.insert(0, total)
        mask = credit.mask & whole & drawn[:, None]
        return Credit(torch.stack(parts, 1) * mask, mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_intermediate(choices, chains=True)


@dataclass(frozen=True)
class AbsoluteValue:
    """Standardised values plus an absolute part, weighted by the trajectory's own value: VGPO.

        A_k = w_k ((Q_k - mean) / (std + eps) + kappa Q_k),  w_k = clip(Q_k / mean_k Q, *bounds)

    mean and std are over the group at step k, mean_k over the sample's steps. kappa applies to the
    first `share` of the steps, so that groups without spread still learn. It pulls towards the
    samples where rewards are positive, and away from them where rewards are negative.
    """

    kappa: float = 0.1
    share: float = 0.5
    bounds: tuple[float, float] = (0.5, 2.0)
    eps: float = 1e-4

    def __post_init__(self) -> None:
        low, high = self.bounds
        if not 0 <= low <= high:
            raise UserError(f"bounds {self.bounds} must be at least 0, the lower one first")
        if not 0 <= self.share <= 1:
            raise UserError(f"the share of the steps must be in [0, 1], not {self.share}")
        if self.kappa < 0:
            raise UserError(f"kappa must be at least 0, not {self.kappa}")

    def __call__(self, credit: Credit, context: Context) -> Credit:
        value, mask = credit

        early = torch.arange(value.shape[1]) < self.share * value.shape[1]
        own = masked_mean(value, mask, 1)
        weight = torch.where(own != 0, value / own, 1.0).clamp(*self.bounds)
        centred = _standard(credit, context, self.eps)
        return Credit(weight * (centred + self.kappa * early[:, None] * value) * mask, mask)


@dataclass(frozen=True)
class WithoutOutcome:
    """Drops the advantage of the outcome: A <- 0. What stands behind it, such as `Potential`, is
    all that trains."""

    def __call__(self, credit: Credit, context: Context) -> Credit:
        return credit._replace(value=torch.zeros_like(credit.value))


@dataclass(frozen=True)
class Potential:
    """Credit plus a step-wise reward that may abstain, as in PARM (arXiv:2501.13926).

        A_k <- A_k + weight (V_{k+1} - mean) / (std + eps)

    mean and std are over the group's scored nodes at step k. Nothing is added where the
    intermediate reward abstains (None). It comes after the transforms that standardise the outcome.
    """

    weight: float = 1.0
    eps: float = 1e-4

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise UserError(
                f"the weight of intermediate rewards must be at least 0, not {self.weight}: "
                "otherwise training would lower them"
            )

    def __call__(self, credit: Credit, context: Context) -> Credit:
        intermediate = _intermediate(context)
        scores = intermediate.values.cpu()
        weights = context.weights if intermediate.weights is None else intermediate.weights
        known = torch.zeros_like(credit.mask)
        known[:, :-1, 0] = intermediate.complete.cpu()[:, 1:]
        total = torch.zeros_like(credit.value)
        total[:, :-1, 0] = scores[:, 1:].double() @ weights.double()

        own = _standard(Credit(total * known, known & credit.mask), context, self.eps)
        return credit._replace(value=credit.value + self.weight * own * credit.mask)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_intermediate(choices, chains=False)


def reads_intermediate(transforms: Sequence[Transform]) -> bool:
    """Whether credit reads intermediate scores."""
    kinds = StepGain | TurningPoint | Discounted | Potential
    return any(isinstance(each, kinds) for each in transforms)


def differs_between_steps(transforms: Sequence[Transform]) -> bool:
    """Whether credit allows intermediate rewards that differ from the samples' rewards."""
    return all(isinstance(each, Potential) for each in transforms if reads_intermediate((each,)))
