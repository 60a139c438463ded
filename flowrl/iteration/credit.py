"""The stage `credit`: from the scores of all processes to advantages.

All processes get all scores, of which there are few, compute all credit and keep their share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.credit.values import Context, Credit
from flowrl.errors import UserError
from flowrl.iteration.records import Credited, PlanCredit, Sampled, Scored
from flowrl.iteration.score import mean_metrics
from flowrl.iteration.stages import Stages
from flowrl.session.session import Session
from flowrl.table import EMPTY, Table
from rewards import Scores


@dataclass(frozen=True)
class SampleCredit:
    """Advantages and mask [n k] of the samples of one plan, of all processes.

    table    columns of these samples that the loss reads
    """

    advantages: Float[Tensor, "n k"]
    mask: Bool[Tensor, "n k"]
    table: Table = EMPTY
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class CreditInput:
    """Inputs of the credit of one plan.

    scores  of all processes
    summed  their weighted sum: `Estimator.summed`
    """

    samples: Sampled
    scores: Scores
    context: Context
    summed: Credit


@runtime_checkable
class Estimate(Protocol):
    def __call__(self, inputs: CreditInput) -> SampleCredit: ...


@dataclass(frozen=True)
class PlainEstimate:
    """The algorithm's advantage."""

    session: Session

    def __call__(self, inputs: CreditInput) -> SampleCredit:
        advantage = self.session.algorithm.advantage
        value, mask = advantage(inputs.scores, inputs.context, inputs.summed)
        return SampleCredit(value.contiguous(), mask.contiguous())


@dataclass(frozen=True)
class CreditStage:
    """Advantages of each plan's samples. Features change `estimate`."""

    session: Session
    estimate: Estimate

    def __call__(self, samples: Sampled, scores: Scored) -> Credited:
        plans = [self.plan(samples, scores, plan) for plan in range(len(samples.rollouts))]
        metrics = mean_metrics([metrics for _, metrics in plans])
        return Credited(tuple(credit for credit, _ in plans), metrics)

    def plan(
        self, samples: Sampled, scores: Scored, plan: int
    ) -> tuple[PlanCredit, dict[str, float]]:
        """Credit of one plan, and its metrics."""
        session, everyone = self.session, scores.plans[plan].everyone
        columns = samples.rollouts[plan].columns
        context = self.context(samples, scores, plan)
        summed = session.algorithm.advantage.summed(everyone, context)
        credited = summed.mask[..., 0].any(1).view(-1, columns.group).any(1)
        handle_failures(everyone, credited, session.run.train.on_failure == "skip_group")
        metrics = score_metrics(everyone, context.weights, columns.group)
        estimated = self.estimate(CreditInput(samples, everyone, context, summed))

        def of_this_process(column: Tensor) -> Tensor:
            return samples.drawn.local(column, columns.group)

        table = estimated.table.arranged(of_this_process, "sample")
        credit = PlanCredit(
            of_this_process(estimated.advantages), of_this_process(estimated.mask), table
        )
        return credit, {**metrics, **estimated.metrics}

    def context(self, samples: Sampled, scores: Scored, plan: int) -> Context:
        """Gather the other inputs of credit from all processes."""
        session, rollout = self.session, samples.rollouts[plan]
        gather = samples.drawn.gatherer(session.parallel)
        table = scores.plans[plan].table.arranged(gather, "sample")
        logp: dict[int, Tensor] = {}
        if session.algorithm.advantage.fusion not in ("mean", "max"):  # nodes weigh by densities
            logp = {edge.step: gather(edge.logp) for edge in rollout.edges}
        return Context(
            rollout.columns,
            session.weights(rollout.iteration),
            logp,
            nodes=None if rollout.nodes is None else gather(rollout.nodes),
            lengths=gather(rollout.lengths),
            prompts=torch.tensor(samples.drawn.draws.rows),
            table=table,
        )


def estimating(stages: Stages, change: Callable[[Estimate], Estimate]) -> Stages:
    """The stages with another way to estimate a plan's advantages."""
    credit = stages.credit
    assert isinstance(credit, CreditStage), "features that wrap the stage come later"
    return replace(stages, credit=replace(credit, estimate=change(credit.estimate)))


def handle_failures(scores: Scores, credited: Tensor, skip: bool) -> None:
    """Stop if groups have no score, or drop those groups if `skip` (`train.on_failure`).

    `credited` [draws]: whether any sample of the group has an advantage. A group to which no reward
    applies is no failure.
    """
    outside = scores.outside.view(len(credited), -1).all(1)
    lost = ~credited & ~outside
    applies = (scores.applies.any(0) & ~scores.scored.any(0)).tolist()
    silent = [name for name, none in zip(scores.names, applies, strict=True) if none]
    silent_rewards = f" (reward {', '.join(silent)} scored nothing)" if silent else ""
    if lost.any() and not skip:
        raise UserError(
            f"{int(lost.sum())} of {len(lost)} groups have no score{silent_rewards}; fix the "
            "reward, or set train.on_failure: skip_group to skip these groups"
        )
    if lost.any() and not credited.any():
        raise UserError(f"no group of this iteration has a score{silent_rewards}; fix the reward")


def score_metrics(scores: Scores, weights: Tensor, group: int) -> dict[str, float]:
    """Means over the samples that have a total, and of each reward over those that it scored.

    A mean without any sample is left out if no reward applies, and NaN if one failed.
    """
    complete, applies = scores.complete, scores.applies
    total = (scores.values @ weights.to(scores.values.dtype)).double()
    totals, metrics = total[complete], dict[str, float]()
    if not scores.outside.all():
        metrics |= {"reward": float(totals.mean()), "reward_std": float(totals.std(correction=0))}
    metrics |= {
        "flat_groups": float((group_ranges(total, complete, group) < 1e-6).double().mean()),
        "unscored": float((~complete).sum()),
        "unscored_share": float((~complete).double().mean()),
    }
    for i, name in enumerate(scores.names):
        column = scores.values[:, i][scores.scored[:, i]]
        if applies[:, i].any():
            metrics[f"reward/{name}"] = float(column.mean()) if len(column) else float("nan")
            metrics[f"reward_std/{name}"] = float(column.std(correction=0))
    return metrics if applies.all() else metrics | abstention_metrics(scores)


def group_ranges(
    total: Float[Tensor, " n"], scored: Bool[Tensor, " n"], group: int
) -> Float[Tensor, " g"]:
    """The highest minus the lowest known total of each group; -inf without any."""
    high = total.masked_fill(~scored, -torch.inf).view(-1, group).amax(1)
    low = total.masked_fill(~scored, torch.inf).view(-1, group).amin(1)
    return high - low


def failed_share(metrics: Mapping[str, float]) -> float:
    """Share of the samples that a reward should have scored and could not."""
    return metrics.get("unscored_share", 0.0) - metrics.get("abstained_share", 0.0)


def abstention_metrics(scores: Scores) -> dict[str, float]:
    """`abstained`: samples to which no reward applies; `applies/NAME`: the share of the samples to
    which a reward applies."""
    shares = scores.applies.double().mean(0).tolist()
    return {
        "abstained": float(scores.outside.sum()),
        "abstained_share": float(scores.outside.double().mean()),
        **{f"applies/{name}": share for name, share in zip(scores.names, shares, strict=True)},
    }
