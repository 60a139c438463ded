"""Parts of an iteration, as tests look into them."""

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from flowrl.iteration import update as updating
from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.features.joint import WRITER
from flowrl.iteration.open import open_stages, open_unit
from flowrl.iteration.records import Credited, Iteration, Sampled, Scored, TrainingRows, Updated
from flowrl.iteration.sample import SampledUnit
from flowrl.iteration.stages import Stages
from flowrl.iteration.units import SamplingUnit, UnitSamples, UnitScores
from flowrl.iteration.update import UpdateStage
from flowrl.likelihoods.rows import Rows
from flowrl.losses.base import Entries
from flowrl.run import train
from flowrl.session.learner import Learner
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from rewards import Samples, Scores


@dataclass(frozen=True)
class Collected(TrainingRows):
    """The rows of an iteration with everything that they were made of."""

    sampled: Sampled | None = None
    scored: Scored | None = None
    credited: Credited | None = None
    stages: Stages | None = None

    @property
    def samples(self) -> Samples:
        """This process's, of the first plan."""
        return self.scored.samples[0]

    @property
    def scores(self) -> Scores:
        return self.scored.plans[0].own

    @property
    def first(self) -> Any:
        """This process's samples of the first plan, with their credit."""
        plan, credit = self.scored.plans[0], self.credited.plans[0]
        part = SimpleNamespace(
            rollout=self.sampled.rollouts[0], samples=self.samples, scores=plan.own,
            everyone=plan.everyone, totals=plan.totals, table=plan.table,
        )  # fmt: skip
        return SimpleNamespace(part=part, credit=(credit.advantages, credit.mask))

    @property
    def chain(self) -> "tuple[Collected, ...]":
        """One part for each model of a joint run."""
        return (*((self.before,) if WRITER in self.table else ()), self)

    @property
    def before(self) -> "Collected":
        """The language model's part of a joint iteration."""
        made: Iteration = self.table[WRITER]
        return collected(made.rows, made.samples, made.scores, made.credit, self.stages)


def collected(
    rows: TrainingRows, sampled: Sampled, scored: Scored, credited: Credited, stages: Stages | None
) -> Collected:
    own = {field.name: getattr(rows, field.name) for field in fields(TrainingRows)}
    own["metrics"] = {**rows.metrics, **(stages.clock.taken() if stages else {})}
    return Collected(**own, sampled=sampled, scored=scored, credited=credited, stages=stages)


def collect(session: Session, iteration: int) -> Collected:
    """All stages of an iteration but the update."""
    stages = open_stages(session, Progress(iteration))
    sampled = stages.sample(stages.draw(iteration))
    scored = stages.score(sampled)
    credited = stages.credit(sampled, scored)
    rows = stages.rows(sampled, scored, credited)
    return collected(rows, sampled, scored, credited, stages)


def update_stage(made: Collected) -> UpdateStage:
    """The plain update within the features of a run."""
    stage: Any = made.stages.update
    while not isinstance(stage, UpdateStage):
        stage = stage.inner if hasattr(stage, "inner") else stage.images
    return stage


PLAIN_LOSS = updating.chunk_loss


def loss_of(made: Collected) -> updating.ChunkLoss:
    """The loss of a chunk; the plain one is looked up anew, since tests put others in its place."""
    loss = update_stage(made).loss
    return updating.chunk_loss if loss is PLAIN_LOSS else loss


def update(
    learner: Learner, made: Collected, progress: Progress, keep_values: bool = False
) -> Updated:
    """The optimizer steps alone, of this learner."""
    prepare = update_stage(made).prepare
    return updating.update(learner, made, progress, keep_values, loss_of(made), prepare)


def chunk_loss(
    learner: Learner, made: Collected, chunk: Rows, equal: frozenset[str] | None = None
) -> tuple[Entries, Tensor]:
    return loss_of(made)(learner, made, chunk, equal)


def add_gradients(learner: Learner, made: Collected, share, equal, tally, seen) -> None:
    loss = loss_of(made)
    updating.add_gradients(learner, made, share, equal, tally, seen, loss)


def iterate(session: Session, progress: Progress, keep_values: bool = False) -> Iteration:
    return train.iterate(open_stages(session, progress, keep_values), progress)


def sample_unit(session: Session, unit: SamplingUnit) -> tuple[SampledUnit, UnitScores]:
    return open_unit(session, PhaseClock()).run(unit)


def with_rows(made: Collected, *rows: Rows) -> Collected:
    return replace(made, rows=rows)


def sample_units(session: Session, unit: SamplingUnit) -> UnitSamples:
    """A unit's samples as the stage of a run makes them: in several units, if it asks for them."""
    return open_stages(session, Progress()).sample.sample_unit(unit).unit


def unit_of(
    iteration: int, ids: tuple[int, ...], rows: tuple[int, ...], by: str = "current"
) -> SamplingUnit:
    return SamplingUnit(iteration, ids, rows, by)


def as_iteration(made: Collected, number: int) -> Iteration:
    """The record of an iteration that is not updated."""
    nothing = Updated({}, 0)
    metrics = dict(made.metrics)
    return Iteration(number, made.sampled, made.scored, made.credited, made, nothing, metrics)
