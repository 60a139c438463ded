"""The stage `rows`: what the likelihood is trained on, with its advantages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from flowrl.iteration.records import Credited, PlanCredit, Sampled, Scored, TrainingRows
from flowrl.iteration.score import mean_metrics
from flowrl.likelihoods.rows import Rows, with_table
from flowrl.likelihoods.transition import Likelihood
from flowrl.media.statistics import merged_means
from flowrl.session.session import Session
from rewards.types import reports


@runtime_checkable
class RowsOfPlan(Protocol):
    def __call__(
        self, likelihood: Likelihood, rollout: Any, credit: PlanCredit, before: Sequence[Rows]
    ) -> list[Rows]:
        """Rows of one plan's samples. `before`: those of the plans before it."""
        ...


def rows_of_plan(
    likelihood: Likelihood, rollout: Any, credit: PlanCredit, before: Sequence[Rows]
) -> list[Rows]:
    """The likelihood's rows, with the columns of their samples."""
    del before
    rows = likelihood.rows(rollout, credit.advantages, credit.mask)
    return [with_table(part, credit.table) for part in rows]


@dataclass(frozen=True)
class RowStage:
    """The rows of each plan's samples. A process whose draws do not count has none."""

    session: Session
    of_plan: RowsOfPlan = rows_of_plan

    def __call__(self, samples: Sampled, scores: Scored, credit: Credited) -> TrainingRows:
        likelihood, rows = self.session.algorithm.likelihood, list[Rows]()
        if samples.drawn.counts:
            for rollout, plan_credit in zip(samples.rollouts, credit.plans, strict=True):
                rows += self.of_plan(likelihood, rollout, plan_credit, rows)
        unit = samples.drawn.unit
        return TrainingRows(
            samples.drawn.iteration,
            tuple(rows),
            unit.ids,
            samples.batch.policy,
            unit.rows,
            metrics=metrics_of(self.session, samples, scores, credit),
        )


def metrics_of(
    session: Session, samples: Sampled, scores: Scored, credit: Credited
) -> dict[str, float]:
    """Metrics of all stages before the update."""
    of_stages: list[Mapping[str, float]] = [samples.metrics, scores.metrics, credit.metrics]
    metrics = {name: value for stage in of_stages for name, value in stage.items()}
    return {**metrics, **descriptions(session, samples, scores)}


def descriptions(session: Session, samples: Sampled, scores: Scored) -> dict[str, float]:
    """Statistics of the samples, reports of rewards and counts, over all processes."""
    gather, unit = session.parallel.every, samples.unit
    statistics = unit.statistics
    own_means = (statistics.means, statistics.size) if samples.drawn.shares[0].counts else None
    metrics = merged_means([means for means in gather(own_means) if means is not None])
    metrics |= mean_metrics(gather(reports(session.reporting) | dict(scores.reports)))
    metrics["count/sampling"] = float(sum(gather(unit.evaluations)))
    metrics["count/scored"] = float(sum(gather(scored_samples(samples, scores))))
    return metrics


def scored_samples(samples: Sampled, scores: Scored) -> int:
    """Number of samples, predicted ones included, that this process scored for its own draws."""
    count, drawn = 0, samples.drawn
    if not drawn.counts:
        return 0
    for rollout in samples.rollouts:
        per_draw = len(rollout.prompt) // sum(len(share.mine) for share in drawn.shares)
        count += sum(len(share.mine) * per_draw for share in drawn.shares if share.counts)
    return count + samples.unit.scored + scores.scored
