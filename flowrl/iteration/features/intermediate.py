"""Scores of the predicted clean samples of intermediate states, for plans that ask for them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.credit import CreditInput, Estimate, SampleCredit, estimating
from flowrl.iteration.sample import SampledUnit, ScoresUnit, UnitStages, unit_decoder
from flowrl.iteration.stages import Stages
from flowrl.iteration.units import SamplingUnit, UnitScores
from flowrl.models.policy import RolloutLike
from flowrl.session.session import Session, score_once
from rewards import Samples, Scores
from rewards.types import IntermediateScores
from samplers import Rollout
from samplers.routes.looks import Seen


def seen_of(rollout: RolloutLike) -> list[Seen]:
    """A rollout's predicted clean samples to score."""
    notes = rollout.notes if isinstance(rollout, Rollout) else ()
    return [note for note in notes if isinstance(note, Seen)]


@dataclass(frozen=True)
class IntermediateScorer:
    """Adds the scores of a rollout's intermediate samples to its scores."""

    session: Session
    iteration: int
    decode: Callable[[RolloutLike], Samples]

    def __call__(self, rollout: RolloutLike, scores: Scores) -> Scores:
        session = self.session
        weights = (
            session.intermediate_weights(self.iteration)
            if session.run.intermediate_rewards
            else None
        )

        def score(samples: Samples) -> Scores:
            return score_once(session.parallel, session.intermediate_rewards, samples)

        scored = intermediate_scores(rollout, lambda states: score(self.decode(states)))
        return replace(
            scores, intermediate=None if scored is None else scored._replace(weights=weights)
        )


def intermediate_scores(
    rollout: RolloutLike, score: Callable[[Rollout], Scores]
) -> IntermediateScores | None:
    """Score a rollout's predicted clean samples; None if its plan has none.

    Each distinct state is scored once. States of one step are scored together, so that groupwise
    rewards and judges compare states of one noise level, and one step after the other.
    """
    noted = seen_of(rollout)
    if not isinstance(rollout, Rollout) or not noted:
        return None
    scored_states = [
        (note, score(replace(rollout, x0=note.x0, prompt=note.prompt, notes=(), edges=())))
        for note in noted
    ]
    n, steps, first = len(rollout.prompt), len(rollout.plan.steps), scored_states[0][1]
    values = first.values.new_zeros(n, steps, len(first.names))
    has_score, abstained = torch.zeros(2, n, steps, len(first.names), dtype=torch.bool)
    for note, of_states in scored_states:
        leaves = n // len(note.x0)
        values[:, note.step] = of_states.values.repeat_interleave(leaves, 0)
        has_score[:, note.step] = of_states.scored.repeat_interleave(leaves, 0)
        abstained[:, note.step] = (~of_states.applies).repeat_interleave(leaves, 0)
    return IntermediateScores(values, has_score, abstained=abstained)


def intermediate_metrics(scores: IntermediateScores) -> dict[str, float]:
    """`unscored_way`: share of the leaves' intermediate states without a score."""
    scored_steps = scores.scored.any(0).any(-1)  # steps: those without any score count as not asked
    has_score = scores.complete[:, scored_steps].double()
    return {"unscored_way": float(1 - has_score.mean()) if has_score.numel() else 1.0}


@dataclass(frozen=True)
class WithIntermediateScores:
    """Adds the scores of intermediate states to a unit's scores."""

    session: Session
    clock: PhaseClock
    inner: ScoresUnit

    def __call__(self, unit: SamplingUnit, sampled: SampledUnit) -> UnitScores:
        scored, rollouts = self.inner(unit, sampled), sampled.unit.rollouts
        count = sum(len(note.x0) for rollout in rollouts for note in seen_of(rollout))
        if not count:
            return scored
        with self.clock("way"):
            decode = unit_decoder(self.session, sampled.batch, unit)
            score_states = IntermediateScorer(self.session, unit.iteration, decode)
            plans = tuple(
                score_states(rollout, scores)
                for rollout, scores in zip(rollouts, scored.plans, strict=True)
            )
        return replace(scored, plans=plans, scored=scored.scored + count)


@dataclass(frozen=True)
class IntermediateMetrics:
    inner: Estimate

    def __call__(self, inputs: CreditInput) -> SampleCredit:
        credit, scores = self.inner(inputs), inputs.scores.intermediate
        if scores is None:
            return credit
        return replace(credit, metrics={**credit.metrics, **intermediate_metrics(scores)})


def wrap_unit(stages: UnitStages, session: Session, clock: PhaseClock) -> UnitStages:
    return stages._replace(score=WithIntermediateScores(session, clock, stages.score))


def wrap(stages: Stages, session: Session) -> Stages:
    del session
    return estimating(stages, IntermediateMetrics)
