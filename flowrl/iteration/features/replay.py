"""Success rates of prompts, which a budget learns from the scores of a round, and earlier successes
that take the place of samples that failed (`flowrl.budget.successes`).

It stands within the features that read rollouts, which read those that are trained on.
"""

from dataclasses import dataclass, replace

from flowrl.budget.spending import Rationed, RoundOutcome
from flowrl.iteration.records import Drawn, PlanScores, Sampled, Scored
from flowrl.iteration.stages import Sample, Score, Stages
from flowrl.models.policy import RolloutLike
from flowrl.session.session import SPENDING, Session
from flowrl.table import Column
from rewards import Scores

OF_ROUND: Column[Scored] = Column("scores of a round", "replay", "whole")
LEARNED: Column[Scores] = Column("scores that are trained on", "replay", "whole")
"""Of all processes; those of replayed samples where some were replaced."""


@dataclass(frozen=True)
class LearnsScores:
    """Samples and scores a round, lets the budget see the scores, and puts the samples that it
    replays in the place of others."""

    session: Session
    spending: Rationed
    sample: Sample
    score: Score

    def __call__(self, drawn: Drawn) -> Sampled:
        samples = self.sample(drawn)
        scores, (share,) = self.score(samples), drawn.shares
        weights = self.session.weights(drawn.iteration)
        rollouts, plans = list[RolloutLike](), list[PlanScores]()
        for rollout, plan in zip(samples.rollouts, scores.plans, strict=True):
            outcome = RoundOutcome(
                drawn.draws, plan.everyone, plan.totals, share.mine, share.counts, drawn.iteration
            )
            learned_rollout, learned_scores = self.spending.scored(rollout, outcome)
            rollouts.append(learned_rollout)
            table = plan.table.with_value(LEARNED, learned_scores)
            plans.append(replace(plan, totals=learned_scores.totals(weights), table=table))
        scores_of_round = replace(scores, plans=tuple(plans))
        return replace(
            samples,
            unit=replace(samples.unit, rollouts=tuple(rollouts)),
            table=samples.table.with_value(OF_ROUND, scores_of_round),
        )


def round_scores(samples: Sampled) -> Scored:
    """The scores of a round, which were made while sampling."""
    return samples.table[OF_ROUND]


def wrap(stages: Stages, session: Session) -> Stages:
    spending = session.table[SPENDING]
    sample = LearnsScores(session, spending, stages.sample, stages.score)
    return replace(stages, sample=sample, score=round_scores)
