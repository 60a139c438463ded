"""Marks of an iteration's most uncertain tokens, for losses that train on a share of them
(`flowrl.losses.weights.HighEntropy`)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.iteration.minibatches import Chunks
from flowrl.iteration.records import TrainingRows
from flowrl.iteration.stages import Stages
from flowrl.iteration.update import Prepare, UpdateStage
from flowrl.likelihoods.rows import Rows
from flowrl.losses.base import entropies
from flowrl.losses.weights import UNCERTAIN, share_bound
from flowrl.models.call_sizes import bounded_call
from flowrl.session.learner import Learner
from flowrl.session.session import Session
from samplers.host import on_host


@dataclass(frozen=True)
class MarksUncertain:
    """Adds the column UNCERTAIN to the rows of all steps."""

    share: float
    inner: Prepare

    def __call__(
        self, learner: Learner, training: TrainingRows, shares: list[Chunks]
    ) -> list[Chunks]:
        return with_uncertain(learner, training, self.inner(learner, training, shares), self.share)


@torch.no_grad()
def with_uncertain(
    learner: Learner, training: TrainingRows, shares: list[Chunks], part: float
) -> list[Chunks]:
    """Mark the most uncertain tokens of the iteration under the policy that sampled; if the loss
    trains only on a share of them. They are chosen once, so that the choice depends neither on
    chunks nor on processes."""
    chunks = [chunk for share in shares for chunk in share]
    using = learner.policies.using(learner.sampler)
    with learner.parallel.together(), bounded_call("training"), using:
        values = [_entropies(learner, training, chunk.rows()) for chunk in chunks]
    unmasked = [column.cpu()[on_host(c.mask)] for c, column in zip(chunks, values, strict=True)]
    entropies_of_all = torch.cat(learner.parallel.every(torch.cat([torch.empty(0), *unmasked])))
    if len(entropies_of_all) == 0:
        return shares
    bound = share_bound(entropies_of_all, part)
    pairs = zip(chunks, values, strict=True)
    marked = iter(
        [
            replace(chunk, table=chunk.table.with_value(UNCERTAIN, column >= bound))
            for chunk, column in pairs
        ]
    )
    return [[next(marked) for _ in share] for share in shares]


def _entropies(learner: Learner, training: TrainingRows, rows: Rows) -> Tensor:
    """Entropies from `old` if it was recomputed, and from a new evaluation if it was stored."""
    if rows.old is not None and rows.old.out is not None:
        return rows.old.out
    return entropies(learner.algorithm.likelihood.evaluate(training.policy, rows))


def wrap(stages: Stages, session: Session) -> Stages:
    share, update = session.algorithm.entropy_share, stages.update
    assert share is not None, "who reads UNCERTAIN has a share"
    assert isinstance(update, UpdateStage), "features that wrap the stage come later"
    prepare = MarksUncertain(share, update.prepare)
    return replace(stages, update=replace(update, prepare=prepare))
