"""A reward that guides sampling: its gradient in the steps of a plan, and how far it moved them."""

from dataclasses import dataclass, replace

import torch

from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.features.reward_gradient import RewardPath
from flowrl.iteration.records import Sampled, Scored
from flowrl.iteration.sample import OpenedUnit, Roll, Rolled, UnitSampler, UnitStages
from flowrl.iteration.stages import Score, Stages
from flowrl.session.session import Session
from samplers import Sampling
from samplers.routes.guiding import GuidedEdges


@dataclass(frozen=True)
class GuidedRoll:
    """Rolls plans out along the gradient of the intermediate rewards."""

    session: Session
    inner: Roll

    def __call__(self, opened: OpenedUnit, sampling: Sampling) -> Rolled:
        unit = opened.unit
        path = RewardPath.guiding(self.session, opened.batch, unit.rows, unit.iteration)
        rolled = self.inner(opened, replace(sampling, slope=path.intermediate_slope))
        return rolled._replace(scored=rolled.scored + path.decoded[0])


def wrap_unit(stages: UnitStages, session: Session, clock: PhaseClock) -> UnitStages:
    del clock
    sampler = stages.sample
    assert isinstance(sampler, UnitSampler), "it comes before features that change the sampler"
    return stages._replace(sample=replace(sampler, roll=GuidedRoll(session, sampler.roll)))


@dataclass(frozen=True)
class WithShift:
    """Reports how far this process's guided steps were moved, if any are trained on."""

    inner: Score

    def __call__(self, samples: Sampled) -> Scored:
        scores = self.inner(samples)
        if not samples.drawn.counts:
            return scores
        edges = [
            e for rollout in samples.rollouts for of_size in rollout.by_size for e in of_size.edges
        ]
        shifts = [edge.moved.mean() for edge in edges if isinstance(edge, GuidedEdges)]
        if not shifts:
            return scores
        shift = float(torch.stack(shifts).mean())
        return replace(scores, reports={**scores.reports, "guide/moved": shift})


def wrap(stages: Stages, session: Session) -> Stages:
    del session
    return replace(stages, score=WithShift(stages.score))
