"""Distances of clean latents within a group, for credit that reads them."""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from flowrl.credit.novelty import LATENT_DISTANCE
from flowrl.iteration.records import Sampled, Scored
from flowrl.iteration.stages import Score, Stages
from flowrl.models.policy import RolloutLike
from flowrl.session.session import Session
from samplers import Rollout
from samplers.mixed import MixedRollout


@dataclass(frozen=True)
class WithLatentDistance:
    """Adds the column LATENT_DISTANCE to the scores."""

    inner: Score

    def __call__(self, samples: Sampled) -> Scored:
        scores = self.inner(samples)
        pairs = zip(samples.rollouts, scores.plans, strict=True)
        plans = [
            replace(plan, table=plan.table.with_value(LATENT_DISTANCE, latent_distances(rollout)))
            for rollout, plan in pairs
        ]
        return replace(scores, plans=tuple(plans))


def latent_distances(rollout: RolloutLike) -> Float[Tensor, " n"]:
    """Root mean square difference of each clean latent from the mean of its group's. Samples of
    several sizes are measured size by size, since a group has one."""
    if isinstance(rollout, MixedRollout):
        return rollout.whole([latent_distances(of_size) for of_size in rollout.by_size])
    assert isinstance(rollout, Rollout), "Novelty refuses texts"
    grouped = rollout.x0.float().view(-1, rollout.plan.group, *rollout.x0.shape[1:])
    from_mean = grouped - grouped.mean(1, keepdim=True)
    return from_mean.square().flatten(2).mean(2).sqrt().flatten()


def wrap(stages: Stages, session: Session) -> Stages:
    del session  # the samples have all that it needs
    return replace(stages, score=WithLatentDistance(stages.score))
