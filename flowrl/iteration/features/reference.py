"""Log-ratios of samples to the initial policy, for a KL penalty inside the reward."""

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flowrl.credit.values import REFERENCE, ReferenceRatios
from flowrl.iteration.credit import CreditInput, Estimate, SampleCredit, estimating
from flowrl.iteration.records import Credited, PlanScores, Sampled, Scored, TrainingRows
from flowrl.iteration.stages import MakeRows, Score, Stages
from flowrl.likelihoods.rows import Evaluation, Rows, take, with_replayed
from flowrl.models.evaluation_counter import Meter
from flowrl.models.policy import RolloutLike
from flowrl.session.finite import refuse
from flowrl.session.learner import Learner
from flowrl.session.session import Session
from flowrl.table import Column
from samplers.completions import TextRollout
from samplers.host import wide

REFERENCE_EVALUATIONS: Column[int] = Column("evaluations of the reference", "reference", "whole")


@runtime_checkable
class Whole(Protocol):
    """A likelihood whose samples have a log-probability: the sum over their entries."""

    def whole(self, rollout: Any) -> tuple[Rows, Int[Tensor, " b"]]: ...  # and which samples


@torch.no_grad()
def reference_log_ratios(
    learner: Learner, policy: Any, rollout: RolloutLike
) -> Float[Tensor, "n t"]:
    """log p(entry | sampling policy) - log p(entry | initial model), in nats.

    This is the k1 estimate of KL(policy | initial policy), positive or negative; a sample's
    estimate is the sum over its entries. NaN for entries that the policy did not sample: after the
    end, in an environment's replies and in samples without rows (greedy ones). NotFiniteError if
    log-probabilities are not finite.

    Stored log-probabilities are the sampler's. They are recomputed if another engine sampled or
    `train.recompute_old` is set, except for replayed texts.
    """
    likelihood, behaviour = learner.algorithm.likelihood, learner.sampler
    assert isinstance(likelihood, Whole), "Algorithm refuses others"
    rows, samples = likelihood.whole(rollout)
    if rows.old is None or learner.run.recomputes_old:
        computed = Evaluation(_log_probabilities(learner, behaviour, policy, rows), None)
        old = with_replayed(computed, rows).logp
    else:
        old = rows.old.logp
    log_ratio = wide(old - _log_probabilities(learner, "ref", policy, rows))
    if not log_ratio[rows.mask].isfinite().all():
        refuse("the model's log-probability of a sample")
    ratios = log_ratio.new_full((len(rollout.prompt), log_ratio.shape[1]), torch.nan)
    ratios[samples] = log_ratio.masked_fill(~rows.mask, torch.nan)
    return ratios


def _log_probabilities(
    learner: Learner, name: str, policy: Any, rows: Rows
) -> Float[Tensor, "b t"]:
    """Evaluate log-probabilities under the weights of that name."""
    most = learner.policy.sizes.training
    assert most is not None  # `load_policy` chose it
    likelihood = learner.algorithm.likelihood
    with learner.policies.using(name):
        chunks = torch.arange(len(rows.prompt), device=rows.prompt.device).split(most)
        logps = [likelihood.evaluate(policy, take(rows, chunk)).logp for chunk in chunks]
    return torch.cat(logps).cpu()


def turns_of(rollout: RolloutLike) -> Int[Tensor, "n t"]:
    """Turn of each token; only texts can have a KL penalty in the reward."""
    assert isinstance(rollout, TextRollout)
    return rollout.point


@dataclass(frozen=True)
class WithReference:
    """Adds the column REFERENCE to the scores."""

    session: Session
    stages: Stages
    inner: Score

    def __call__(self, samples: Sampled) -> Scored:
        scores, meter = self.inner(samples), Meter()
        policy = meter(samples.batch.policy)

        def measured(rollout: RolloutLike, plan: PlanScores) -> PlanScores:
            ratios = reference_log_ratios(self.session.learner, policy, rollout)
            value = ReferenceRatios(ratios, turns_of(rollout))
            return replace(plan, table=plan.table.with_value(REFERENCE, value))

        with self.session.parallel.together(), self.stages.clock("ref"):
            pairs = zip(samples.rollouts, scores.plans, strict=True)
            plans = tuple(measured(*pair) for pair in pairs)
        table = scores.table.with_value(REFERENCE_EVALUATIONS, meter.frozen)
        return replace(scores, plans=plans, table=table)


@dataclass(frozen=True)
class PenaltyMetrics:
    """`kl_sample`: the mean KL of the samples in the loss, in nats, that is subtracted from their
    reward."""

    inner: Estimate

    def __call__(self, inputs: CreditInput) -> SampleCredit:
        credit = self.inner(inputs)
        trained = credit.mask.any(1)
        log_ratios = inputs.context.table[REFERENCE].log_ratios[trained].nansum()
        kl = float(log_ratios / trained.sum().clamp(min=1))
        return replace(credit, metrics={**credit.metrics, "kl_sample": kl})


@dataclass(frozen=True)
class CountedRows:
    """Counts the evaluations of the initial policy among the update's."""

    inner: MakeRows

    def __call__(self, samples: Sampled, scores: Scored, credit: Credited) -> TrainingRows:
        rows = self.inner(samples, scores, credit)
        return replace(rows, frozen=rows.frozen + scores.table[REFERENCE_EVALUATIONS])


def wrap(stages: Stages, session: Session) -> Stages:
    stages = replace(
        stages,
        score=WithReference(session, stages, stages.score),
        rows=CountedRows(stages.rows),
    )
    return estimating(stages, PenaltyMetrics)
