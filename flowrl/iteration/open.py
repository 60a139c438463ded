"""A run's stages: the plain ones, wrapped in the features that its settings and parts ask for.

A feature is a file of `flowrl.iteration.features`. Workers share the features of a unit of draws;
the features of whole iterations stand around them. The order below is that of the wrapping, the
innermost first: a tracker's statistics are of a budget's groups, so it stands within the budget; a
gate compares all samples, so it stands outside. A run of two models has the stages of each, and one
feature joins them. A column that credit or the loss reads names its feature itself
(`Column.owner`); a feature that is opened by a column alone comes last. Columns of the stages
themselves (`flowrl.table.STAGES`) open nothing.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from flowrl.credit.trackers import TRACKER
from flowrl.errors import feature_files
from flowrl.iteration.clock import PhaseClock
from flowrl.iteration.credit import CreditStage, PlainEstimate
from flowrl.iteration.draw import PlainDraw
from flowrl.iteration.rows import RowStage
from flowrl.iteration.sample import PlainEncode, SampleStage, UnitSampler, UnitStages
from flowrl.iteration.score import ScoreStage, UnitScorer
from flowrl.iteration.stages import Stages
from flowrl.iteration.update import UpdateStage
from flowrl.laws.algorithms import is_included
from flowrl.session.given_samples import GIVEN
from flowrl.session.progress import Progress
from flowrl.session.session import ASKING, SOURCE, SPENDING, Session
from flowrl.table import STAGES, Column
from samplers.route import RouteRequest

FEATURES = "flowrl.iteration.features"


class Feature(NamedTuple):
    """A file of features, and whether a run needs it."""

    name: str
    needed: Callable[[Session], bool]


def _asks(name: RouteRequest) -> Callable[[Session], bool]:
    """Whether the route of a plan asks for it."""
    return lambda session: name in session.algorithm.asks


def _may_ask(name: RouteRequest) -> Callable[[Session], bool]:
    """Whether the route of a plan asks for it, or may in a later iteration: a planner of the user's
    may change its plans."""

    def needed(session: Session) -> bool:
        algorithm = session.algorithm
        of_user = not is_included(algorithm.plan)
        return not algorithm.text and (of_user or name in algorithm.asks)

    return needed


def _has_turns(session: Session) -> bool:
    run = session.run
    return session.algorithm.text and (run.environment is not None or run.text_steps is not None)


def _overlaps(session: Session) -> bool:
    gpu = session.parallel.device == "cuda"
    # votes are on all samples, so nothing is scored before the last one
    asks = ASKING in session.table
    return not asks and (gpu or (bool(session.rewards) and not session.scores_in_turn))


def _holds(column: Column[Any]) -> Callable[[Session], bool]:
    """Whether the session has what the feature holds for a whole run."""
    return lambda session: column in session.table


def _reads(name: str) -> Callable[[Session], bool]:
    """Whether credit or the loss reads a column of the feature."""
    return lambda session: name in {column.owner for column in session.algorithm.reads}


OF_TWO_MODELS = Feature("joint", lambda s: s.prompt_writer is not None)
OF_UNITS = (
    OF_TWO_MODELS,
    Feature("lookahead", _may_ask("score")),
    Feature("guide", _asks("slope")),
    Feature("overlap", _overlaps),
    Feature("intermediate", _may_ask("seen")),
    Feature("turns", _has_turns),
)
OF_ITERATIONS = (
    Feature("sizes", lambda s: s.several_sizes),
    Feature("reward_gradient", lambda s: s.algorithm.reward_gradient),
    Feature("teachers", lambda s: s.run.teachers is not None),
    Feature("uncertain", _reads("uncertain")),
    Feature("tracker", _holds(TRACKER)),
    Feature("ask", _holds(ASKING)),
    Feature("start_values", lambda s: s.algorithm.samples_start),
    Feature("replay", _holds(SPENDING)),
    Feature("reference", _reads("reference")),
    Feature("budget", _holds(SPENDING)),
    Feature("gate", _reads("gate")),
    Feature("turns", _has_turns),
    Feature("intermediate", _may_ask("seen")),
    Feature("guide", _asks("moved")),
    Feature("units", _holds(SOURCE)),
    Feature("given", _holds(GIVEN)),
    Feature("engine", lambda s: s.run.engine is not None),
)


def feature(name: str) -> Any:
    """The module of a feature. UserError, in a sentence, where it is not installed."""
    with feature_files(FEATURES, name):
        return import_module(f"{FEATURES}.{name}")


def open_unit(session: Session, clock: PhaseClock) -> UnitStages:
    """The sampling and scoring of a unit of draws, on any process."""
    stages = UnitStages(UnitSampler.plain(session, clock), UnitScorer(session, clock))
    for entry in OF_UNITS:
        if entry.needed(session):
            stages = feature(entry.name).wrap_unit(stages, session, clock)
    return stages


def timed_units(session: Session) -> Callable[[dict[str, float]], UnitStages]:
    """The sampling and scoring of a unit, with its seconds added to a mapping by phase."""
    return lambda seconds: open_unit(session, PhaseClock(seconds))


def open_stages(session: Session, progress: Progress, keep_values: bool = False) -> Stages:
    """The stages of a run.

    `progress` is read and counted on by the update; `keep_values`: whether it keeps the values of
    all entries, for an observer.
    """
    clock = PhaseClock()
    stages = wrapped(plain_stages(session, progress, clock, keep_values), session)
    if OF_TWO_MODELS.needed(session):
        joint, writer = feature(OF_TWO_MODELS.name), session.prompt_writer
        assert writer is not None, "the second model is the one that writes prompts"
        texts = joint.scored_by_images(plain_stages(writer, progress, clock, keep_values), writer)
        stages = joint.wrap(stages, session, wrapped(texts, writer))
    return stages


def plain_stages(
    session: Session, progress: Progress, clock: PhaseClock, keep_values: bool = False
) -> Stages:
    """The stages without features of whole iterations."""
    unit = open_unit(session, clock)
    if SOURCE in session.table or session.run.workers.unit is not None:
        encode = PlainEncode(session, clock)
        unit = feature("units").wrap_unit(unit, session, clock, encode)
    return Stages(
        draw=PlainDraw(session),
        sample=SampleStage(session, unit.sample),
        score=ScoreStage(session, unit.score),
        credit=CreditStage(session, PlainEstimate(session)),
        rows=RowStage(session),
        update=UpdateStage(session.learner, session.terminal, progress, clock, keep_values),
        clock=clock,
    )


def wrapped(stages: Stages, session: Session) -> Stages:
    """One model's stages in the features that the run needs."""
    for entry in OF_ITERATIONS:
        if entry.needed(session):
            stages = feature(entry.name).wrap(stages, session)
    listed = {entry.name for entry in (*OF_UNITS, *OF_ITERATIONS)}
    owners = {column.owner for column in session.algorithm.reads}
    for name in sorted(owners - listed - {*STAGES}):
        stages = feature(name).wrap(stages, session)
    return stages
