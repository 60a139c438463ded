"""The stage `score`: ask the rewards."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.records import PlanScores, Sampled, Scored
from flowrl.iteration.sample import SampledUnit, ScoresUnit, sampling_together
from flowrl.iteration.units import EARLY, SamplingUnit, UnitScores
from flowrl.session.session import Session, score_once
from flowrl.session.smaller_calls import with_smaller_calls
from rewards import Samples, Scores


@dataclass(frozen=True)
class UnitScorer:
    """Scores the samples of a unit, plan after plan."""

    session: Session
    clock: PhaseClock

    def __call__(self, unit: SamplingUnit, sampled: SampledUnit) -> UnitScores:
        del unit  # its samples are decoded
        session, samples = self.session, list[Samples]()
        with self.clock("score"):
            for plan_samples in sampled.unit.samples:
                assert isinstance(plan_samples, Samples), "they were decoded here"
                samples.append(plan_samples)
            scores = [
                score_once(session.parallel, session.rewards, plan_samples)
                for plan_samples in samples
            ]
            return UnitScores(
                tuple(scores), tuple(plan_samples.on_cpu() for plan_samples in samples)
            )


@dataclass(frozen=True)
class ScoreStage:
    """Scores this process's samples, and gathers the scores of all processes."""

    session: Session
    score_unit: ScoresUnit

    def __call__(self, samples: Sampled) -> Scored:
        session, drawn = self.session, samples.drawn

        def scored() -> UnitScores:
            with sampling_together(session, drawn.by):
                return self.score_unit(drawn.unit, SampledUnit(samples.batch, samples.unit))

        unit = with_smaller_calls(session.learner, session.terminal, scored)
        gather = drawn.gatherer(session.parallel)
        weights = session.weights(drawn.iteration)
        plans = [plan_scores(scores, scores.arranged(gather), weights) for scores in unit.plans]
        return Scored(tuple(plans), unit.samples, unit.scored, unit.reports)


def early_scores(unit: SamplingUnit, sampled: SampledUnit) -> UnitScores:
    """The scores of a unit that was scored while it was sampled."""
    del unit
    return sampled.unit.table[EARLY]


def joined_columns(columns: Sequence[Scores], names: tuple[str, ...]) -> Scores:
    """Combine scores of the same samples by different rewards, in the order of `names`."""
    by_reward = {name: scores.column(name) for scores in columns for name in scores.names}
    return Scores.of_rewards({name: by_reward[name] for name in names})


def plan_scores(local: Scores, everyone: Scores, weights: Tensor) -> PlanScores:
    return PlanScores(local, everyone, everyone.totals(weights))


def mean_metrics(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average each metric over the parts that have it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: sum(column) / len(column) for name, column in values.items()}
