"""Turns of a conversation, or steps of a text: which of them a sample has, and their rewards.

Rewards of single turns or steps are scores of decision points, one column in all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.credit.process import Information
from flowrl.credit.values import SAMPLE_TURNS, SampleTurns
from flowrl.errors import UserError
from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.credit import CreditInput, Estimate, SampleCredit, estimating
from flowrl.iteration.records import PlanScores, Sampled, Scored
from flowrl.iteration.sample import SampledUnit, ScoresUnit, UnitStages
from flowrl.iteration.score import early_scores
from flowrl.iteration.stages import Score, Stages
from flowrl.iteration.units import EARLY, SamplingUnit, UnitScores
from flowrl.models.policy import Batch, RolloutLike
from flowrl.session.session import Session, score_once
from flowrl.settings.model.environment import ONE_CREDIT
from rewards import Samples, Scores
from rewards.types import IntermediateScores
from samplers.completions import StepPoints, TextRollout, TurnPoints


@runtime_checkable
class TurnBatch(Protocol):
    """A batch whose completions have turns or steps."""

    def beginnings(self, rollout: TextRollout, media: Sequence[str]) -> list[list[str]]: ...

    def information(
        self,
        rollout: TextRollout,
        information: Information,
        meta: Sequence[Mapping[str, Any]],
        rows: int,
    ) -> Float[Tensor, "n k"]: ...


@dataclass
class TurnScorer:
    """Adds rewards of turns or steps to scores: the sum of the environment's own, of
    `intermediate_rewards` of the text so far, and of IGPO's gains. A turn has a reward where one
    of them has."""

    session: Session
    iteration: int
    batch: Batch
    by: str  # the policy that sampled
    looked: int = field(default=0, init=False)  # texts that were scored

    def __call__(self, rollout: RolloutLike, samples: Samples, scores: Scores) -> Scores:
        if not isinstance(rollout, TextRollout) or not isinstance(
            rollout.points, TurnPoints | StepPoints
        ):
            return scores
        shape = len(rollout.ids), rollout.plan.turns
        total = torch.zeros(shape, dtype=torch.float64)
        scored = torch.zeros(shape, dtype=torch.bool)
        for rewards in (
            rollout.points.rewards if isinstance(rollout.points, TurnPoints) else None,
            self._named(rollout, samples),
            self._gains(rollout, samples),
        ):
            if rewards is not None:
                total, scored = total + rewards.nan_to_num(0.0), scored | ~rewards.isnan()
        turns = IntermediateScores(total[..., None], scored[..., None], torch.ones(1))
        return replace(scores, intermediate=turns)

    def _named(self, rollout: TextRollout, samples: Samples) -> Float[Tensor, "n k"] | None:
        """The weighted sum of `intermediate_rewards` that apply, NaN where one has no score."""
        session = self.session
        if not session.run.intermediate_rewards:
            return None
        assert isinstance(self.batch, TurnBatch)
        texts = self.batch.beginnings(rollout, samples.media)
        rows = [(k, i) for k in range(rollout.plan.turns) for i in range(len(texts))]
        rows = [(k, i) for k, i in rows if k < len(texts[i])]
        step, sample = (torch.tensor(column) for column in zip(*rows, strict=True))
        turn_samples = samples.take(sample)  # a turn's texts are a group of their own
        groups = int(turn_samples.group.max()) + 1
        turn_samples = replace(
            turn_samples,
            media=[texts[i][k] for k, i in rows],
            group=turn_samples.group + step * groups,
        )
        scores = score_once(session.parallel, session.intermediate_rewards, turn_samples)
        self.looked += len(rows)
        if not scores.complete.any() and not scores.outside.all():
            raise UserError(
                f"intermediate_rewards: {', '.join(scores.names)} scored none of {len(rows)} turns "
                "or steps: fix the reward"
            )
        total = scores.totals(session.intermediate_weights(self.iteration)).double()
        by_turn = torch.full((len(texts), rollout.plan.turns), torch.nan, dtype=torch.float64)
        return by_turn.index_put((sample, step), total.cpu())

    def _gains(self, rollout: TextRollout, samples: Samples) -> Float[Tensor, "n k"] | None:
        information, learner = self.session.algorithm.information, self.session.learner
        if information is None:
            return None
        assert isinstance(self.batch, TurnBatch)
        most = learner.policy.sizes.training
        assert most is not None  # `load_policy` chose it
        with learner.policies.using(self.by):
            meta = samples.meta or [{} for _ in samples.prompts]
            return self.batch.information(rollout, information, meta, most)


def turn_metrics(scores: Scores, by_turn: bool) -> dict[str, float]:
    """`reward_turns`: mean over samples of the sum of their turns' own rewards. UserError for such
    rewards if all turns share one credit (`by_turn` is False)."""
    assert scores.intermediate is not None
    if not scores.intermediate.scored.any():
        return {}
    if not by_turn:
        raise UserError(ONE_CREDIT)
    return {"reward_turns": float(scores.intermediate.values.double().sum((1, 2)).mean())}


@dataclass(frozen=True)
class ScoredTurns:
    """Adds rewards of turns or steps to a unit's scores."""

    session: Session
    clock: PhaseClock
    inner: ScoresUnit

    def __call__(self, unit: SamplingUnit, sampled: SampledUnit) -> UnitScores:
        of_outcomes, rollouts = self.inner(unit, sampled), sampled.unit.rollouts
        score_turns = TurnScorer(self.session, unit.iteration, sampled.batch, unit.by)
        plans = list[Scores]()
        with self.clock("way"):
            for rollout, samples, scores in zip(
                rollouts, sampled.unit.samples, of_outcomes.plans, strict=True
            ):
                assert isinstance(samples, Samples), "texts stay with their scores"
                plans.append(score_turns(rollout, samples, scores))
        return replace(
            of_outcomes, plans=tuple(plans), scored=of_outcomes.scored + score_turns.looked
        )


@dataclass(frozen=True)
class WithTurns:
    """Adds the column SAMPLE_TURNS to the scores."""

    inner: Score

    def __call__(self, samples: Sampled) -> Scored:
        scores = self.inner(samples)
        pairs = zip(samples.rollouts, scores.plans, strict=True)
        return replace(scores, plans=tuple(with_turns(*pair) for pair in pairs))


def with_turns(rollout: RolloutLike, scores: PlanScores) -> PlanScores:
    if not isinstance(rollout, TextRollout) or not isinstance(
        rollout.points, TurnPoints | StepPoints
    ):
        return scores
    # steps of a completion have no states
    unknown = torch.zeros(rollout.exists.shape, dtype=torch.long)
    states = rollout.points.states if isinstance(rollout.points, TurnPoints) else unknown
    turns = SampleTurns(rollout.exists, states)
    return replace(scores, table=scores.table.with_value(SAMPLE_TURNS, turns))


@dataclass(frozen=True)
class TurnMetrics:
    session: Session
    inner: Estimate

    def __call__(self, inputs: CreditInput) -> SampleCredit:
        credit = self.inner(inputs)
        if inputs.scores.intermediate is None:
            return credit
        metrics = turn_metrics(inputs.scores, self.session.algorithm.by_turn)
        return replace(credit, metrics={**credit.metrics, **metrics})


def wrap_unit(stages: UnitStages, session: Session, clock: PhaseClock) -> UnitStages:
    """Turns that the model itself is asked about are scored while its weights are whole."""
    scored = stages._replace(score=ScoredTurns(session, clock, stages.score))
    if session.algorithm.information is None:
        return scored

    def sample(unit: SamplingUnit) -> SampledUnit:
        sampled, scores = scored.run(unit)
        meter = sampled.batch.meter  # has counted the questions too
        table = sampled.unit.table.with_value(EARLY, scores)
        unit_samples = replace(sampled.unit, table=table, evaluations=meter.graded + meter.frozen)
        return sampled._replace(unit=unit_samples)

    return UnitStages(sample, early_scores)


def wrap(stages: Stages, session: Session) -> Stages:
    stages = replace(stages, score=WithTurns(stages.score))
    return estimating(stages, lambda inner: TurnMetrics(session, inner))
