"""Scores of predicted samples while sampling, for plans that steer, shrink their group or are
guided by probes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.sample import OpenedUnit, Roll, Rolled, UnitSampler, UnitStages
from flowrl.models.policy import RolloutLike
from flowrl.session.session import Session
from rewards import Samples, score_all
from samplers import Sampling


@dataclass
class Lookahead:
    """Weighted rewards of predicted samples, and their number so far."""

    session: Session
    iteration: int
    decode: Callable[[RolloutLike], Samples]
    count: int = 0

    def __call__(self, rollout: RolloutLike) -> Tensor:
        """Return the weighted rewards [n]. One process scores for all processes that share its
        calls."""
        self.count += len(rollout.prompt)
        samples = self.decode(rollout)
        scores = self.session.parallel.once(
            lambda: score_all(self.session.intermediate_rewards, samples)
        )
        return scores.totals(self.session.intermediate_weights(self.iteration))


@dataclass(frozen=True)
class LookaheadRoll:
    """Rolls plans out that ask for scores while they are rolled."""

    session: Session
    inner: Roll

    def __call__(self, opened: OpenedUnit, sampling: Sampling) -> Rolled:
        look = Lookahead(self.session, opened.unit.iteration, opened.decode)
        rolled = self.inner(opened, replace(sampling, score=look))
        return rolled._replace(scored=rolled.scored + look.count)


def wrap_unit(stages: UnitStages, session: Session, clock: PhaseClock) -> UnitStages:
    del clock
    sampler = stages.sample
    assert isinstance(sampler, UnitSampler), "it comes before features that change the sampler"
    sampler = replace(sampler, roll=LookaheadRoll(session, sampler.roll))
    return stages._replace(sample=sampler)
