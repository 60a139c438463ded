"""Rows of samples that an engine drew: the learner computes `old` itself, and the engine's
log-densities stay beside it.

Recipes whose rows have no density of the sampler, such as NFT, compare a few chains of one prompt
with the engine in each iteration instead.
"""

from dataclasses import dataclass, replace

from flowrl.iteration.records import Credited, Sampled, Scored, TrainingRows
from flowrl.iteration.sample import sampling_weights
from flowrl.iteration.stages import MakeRows, Stages
from flowrl.likelihoods.rows import ENGINE, Rows
from flowrl.likelihoods.transition import Transition
from flowrl.models.engine.check import probed
from flowrl.session.session import Session


def sampled_by_engine(rows: Rows) -> Rows:
    """Rows without `old`, which the update evaluates, and with what the engine said."""
    if rows.old is None:
        return rows
    return replace(rows, old=None, table=rows.table.with_value(ENGINE, rows.old))


@dataclass(frozen=True)
class EngineRows:
    inner: MakeRows

    def __call__(self, samples: Sampled, scores: Scored, credit: Credited) -> TrainingRows:
        rows = self.inner(samples, scores, credit)
        return replace(rows, rows=tuple(map(sampled_by_engine, rows.rows)))


@dataclass(frozen=True)
class ProbedRows:
    """Measures `mismatch` on chains of the iteration's first prompt. Collective."""

    session: Session
    inner: MakeRows

    def __call__(self, samples: Sampled, scores: Scored, credit: Credited) -> TrainingRows:
        rows, session, unit = self.inner(samples, scores, credit), self.session, samples.drawn.unit
        learner = session.learner
        (text,), meta = session.prompts.take(unit.rows[:1])
        by = sampling_weights(learner, unit.by)
        with session.parallel.together(), learner.policies.using(by):
            row = meta[0] if meta else {}
            mismatch = probed(learner.policy, text, row, learner.algorithm.steps, unit.iteration)
        mismatches = session.parallel.every(mismatch)
        return replace(
            rows, metrics={**rows.metrics, "mismatch": sum(mismatches) / len(mismatches)}
        )


def wrap(stages: Stages, session: Session) -> Stages:
    if isinstance(session.algorithm.likelihood, Transition):
        return replace(stages, rows=EngineRows(stages.rows))
    return replace(stages, rows=ProbedRows(session, stages.rows))
