"""Samples in several units: cut here (`workers.unit`), or made by a source outside the stages
(`workers.sampling`, `workers.lag`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.records import Credited, Drawn, Sampled, Scored, TrainingRows
from flowrl.iteration.sample import EncodeUnit, SampledUnit, UnitStages
from flowrl.iteration.score import early_scores
from flowrl.iteration.stages import Draw, MakeRows, Stages
from flowrl.iteration.units import (
    EARLY,
    LAG,
    SamplingUnit,
    UnitSamples,
    UnitScores,
    UnitSource,
    added,
    joined_rollouts,
    joined_units,
)
from flowrl.models.policy import Batch, RolloutLike
from flowrl.session.session import SOURCE, Session
from samplers.slices import draws_per_slice

Join = Callable[[Sequence[SamplingUnit], Sequence[RolloutLike]], RolloutLike]


def units_of(session: Session, share: SamplingUnit) -> list[SamplingUnit]:
    """Cut a share of draws into units of `workers.unit`."""
    size = session.run.workers.unit
    if size is None or size >= len(share.ids) or not cuttable(session, share.iteration):
        return [share]
    return share.cut(size)


def cuttable(session: Session, iteration: int) -> bool:
    """Whether an iteration's draws can be split into units. Draws of a plan that steers, is guided,
    scores intermediate samples, or has trees of texts or turns form a single unit."""
    run, algorithm = session.run, session.algorithm
    plans = algorithm.planned(run.levels(algorithm.steps), iteration, run.train.seed)
    return all(draws_per_slice(plan, 1) is not None for plan in plans)


def join_of(session: Session) -> Join:
    """Return the function that joins the rollouts of several units."""
    if not session.several_sizes:
        return joined_rollouts
    from flowrl.iteration.features.sizes import joined_sizes

    return joined_sizes


@dataclass(frozen=True)
class CutUnits:
    """Samples and scores each unit in calls of its own, and joins them. All prompts are encoded
    again together, for the update."""

    session: Session
    inner: UnitStages
    encode: EncodeUnit

    def __call__(self, unit: SamplingUnit) -> SampledUnit:
        units = units_of(self.session, unit)
        if len(units) == 1:
            sampled, scores = self.inner.run(unit)
            return _with_scores(sampled.batch, sampled.unit, scores)
        pairs = [(sampled.unit, scores) for sampled, scores in map(self.inner.run, units)]
        joined = joined_units(units, pairs, join_of(self.session))
        return SampledUnit(self.encode(unit), joined)


@dataclass(frozen=True)
class SourcedUnits:
    """Takes the samples of a source. All prompts are encoded here, for the update."""

    session: Session
    source: UnitSource
    encode: EncodeUnit
    clock: PhaseClock

    def __call__(self, unit: SamplingUnit) -> SampledUnit:
        units = units_of(self.session, unit)
        pairs = self.source.samples(units, self.clock.seconds)
        if len(pairs) == 1:
            return _with_scores(self.encode(unit), *pairs[0])
        return SampledUnit(self.encode(unit), joined_units(units, pairs, join_of(self.session)))


def _with_scores(batch: Batch, unit: UnitSamples, scores: UnitScores) -> SampledUnit:
    return SampledUnit(batch, replace(unit, table=unit.table.with_value(EARLY, scores)))


def wrap_unit(
    stages: UnitStages, session: Session, clock: PhaseClock, encode: EncodeUnit
) -> UnitStages:
    if SOURCE not in session.table:
        return UnitStages(CutUnits(session, stages, encode), early_scores)
    source = session.table[SOURCE]
    assert isinstance(source, UnitSource), "it samples units"
    return UnitStages(SourcedUnits(session, source, encode, clock), early_scores)


@dataclass(frozen=True)
class DrawAhead:
    """Draws what the source has begun to sample."""

    session: Session
    source: UnitSource
    inner: Draw

    def __call__(self, iteration: int) -> Drawn:
        self.source.begin(iteration)
        draws = self.source.draws(iteration)
        if draws is None:
            return self.inner(iteration)
        return Drawn.of(self.session.parallel, iteration, draws, self.session.algorithm.behaviour)


@dataclass(frozen=True)
class SourceMetrics:
    """Adds what each process has sent and received."""

    session: Session
    source: UnitSource
    inner: MakeRows

    def __call__(self, samples: Sampled, scores: Scored, credit: Credited) -> TrainingRows:
        rows = self.inner(samples, scores, credit)
        by_process = self.session.parallel.every(self.source.metrics())
        return replace(rows, metrics={**rows.metrics, **summed_metrics(by_process)})


def summed_metrics(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Add up what each process counts; a lag, and how draws were chosen, are the same for all."""
    counted_names = {
        name for name in rows[0] if name.startswith(("workers/", "seconds/")) and name != LAG
    }
    counted = added([{name: row[name] for name in row if name in counted_names} for row in rows])
    return {**rows[0], **counted}


def wrap(stages: Stages, session: Session) -> Stages:
    source = session.table[SOURCE]
    assert isinstance(source, UnitSource), "it samples units"
    return replace(
        stages,
        draw=DrawAhead(session, source, stages.draw),
        rows=SourceMetrics(session, source, stages.rows),
    )
