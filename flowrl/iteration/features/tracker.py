"""Statistics that credit keeps between iterations, and prompts drawn by them."""

from dataclasses import dataclass, replace

from flowrl.credit.trackers import TRACKER, Tracker
from flowrl.iteration.credit import CreditInput, Estimate, SampleCredit, estimating
from flowrl.iteration.draw import draws_here
from flowrl.iteration.draw_requests import draw_request
from flowrl.iteration.records import Drawn
from flowrl.iteration.stages import Stages
from flowrl.session.session import Session
from flowrl.table import Column
from rewards import Scores

SAMPLED_SCORES: Column[Scores] = Column("scores as sampled", "budget", "whole")
"""Where a budget replaces samples: the scores of those that were sampled, which a tracker reads."""


@dataclass(frozen=True)
class WeightedDraw:
    """Draws prompts by the tracker's weights."""

    session: Session

    def __call__(self, iteration: int) -> Drawn:
        request = draw_request(self.session, iteration)
        return draws_here(self.session, iteration, request.drawn())


@dataclass(frozen=True)
class TrackedEstimate:
    """Pass the tracker's statistics to credit, and the scores to the tracker."""

    session: Session
    tracker: Tracker
    inner: Estimate

    def __call__(self, inputs: CreditInput) -> SampleCredit:
        context = self.tracker.before(inputs.context)
        summed = self.session.algorithm.advantage.summed(inputs.scores, context)
        credit = self.inner(replace(inputs, context=context, summed=summed))
        sampled = inputs.context.table.get(SAMPLED_SCORES, inputs.scores)
        self.tracker.after(sampled, context)
        return credit


def wrap(stages: Stages, session: Session) -> Stages:
    tracker = session.table[TRACKER]
    stages = replace(stages, draw=WeightedDraw(session))
    return estimating(stages, lambda inner: TrackedEstimate(session, tracker, inner))
