"""Rows of the prompt file that nothing can win, found before they are drawn.

A reward that knows (`rewards.checks.winnable`) is asked for every training row. Answers that take
no work are there before the first iteration. Those that run a program are asked for the rows of the
first iterations at the start, and for all others when they are about to be drawn; another row is
then drawn in place of a lost one. Answers are kept by a hash of what they depend on, in the run's
folder and, for other runs, in flowrl's cache.

The main process asks, and tells the others. `row_checks.jsonl` records which rows a run leaves out:
a resumed run reads it, so its draws are those of an uninterrupted one.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from accelerate import PartialState

from flowrl.errors import UserError
from flowrl.models.description import describe
from flowrl.models.image_check import ImageRows
from flowrl.paths import cache_folder
from flowrl.processes.meeting import agreed
from flowrl.prompts import PromptSet
from flowrl.session.row_answers import (
    ANSWERS_FILE,
    TRAINING_ROWS,
    Asker,
    KeptAnswers,
    RowAnswers,
    WinnableDraws,
    append,
    askers_of,
    lost_of,
    read_lines,
    rows_named,
)
from flowrl.session.session import WINNABLE, Session
from flowrl.settings import OwnSettings, RunSettings

RECORD = "row_checks.jsonl"  # in a run's folder
FIRST = 8  # iterations whose rows are asked for at the start


def with_rows_checked(session: Session, begun: bool) -> Session:
    """The session of a run whose rows that nothing can win are known.

    `begun`: whether it goes on after a checkpoint. UserError for a new run with such rows, unless
    `prompts.unwinnable` says otherwise.
    """
    images = _image_askers(session)
    askers = [*askers_of(session.rewards), *images]
    if not askers or session.draw_count == 0:
        return session
    stored = KeptAnswers([session.folder / RECORD, cache_folder() / ANSWERS_FILE])
    answers, state = RowAnswers(session.prompts, askers, stored), PartialState()
    left_out = agreed(state, lambda: _at_start(session, answers, begun))
    if left_out is None:  # all rows are drawn but those that cannot be
        left_out, answers = [], replace(answers, askers=images)
    answers = replace(answers, prompts=session.prompts.without(left_out, TRAINING_ROWS))
    winnable = WinnableDraws(answers, session.run.train.seed, state, session.terminal.warn)
    table = session.table.with_value(WINNABLE, winnable)
    return replace(session, prompts=answers.prompts, table=table)


def _warn_of_held_out(session: Session, prompts: PromptSet) -> None:
    """Held-out rows stay: without them later scores could not be compared with earlier ones."""
    judges = askers_of(session.judges)
    lost = lost_of(RowAnswers(prompts, judges, KeptAnswers([])).at_once())
    if lost:
        session.terminal.warn(f"{_sentence(prompts, lost, 'prompts.held_out')}; they are kept")


def _image_askers(session: Session) -> list[Asker]:
    """The files of images that the model takes from the rows."""
    model = session.run.model
    described = None if isinstance(model, OwnSettings) else describe(model)
    names = [] if described is None else described.image_columns(session.prompts.columns)
    return [Asker("image", ImageRows(tuple(names)))] if names else []


def _at_start(session: Session, answers: RowAnswers, begun: bool) -> list[int] | None:
    """The rows that a run never draws; None for a run that draws all of them."""
    answers.kept.read()
    run, prompts, record = session.run, session.prompts, session.folder / RECORD
    assert session.start_record is not None, "the main process has one"
    digest = session.start_record.prompts.get(TRAINING_ROWS, "")
    recorded = _recorded(record, digest, len(prompts))
    if recorded is not None:
        return recorded
    if session.held_out is not None:
        _warn_of_held_out(session, session.held_out)
    lost, mode = lost_of(answers.at_once()), run.prompts.unwinnable
    if mode == "keep" or (begun and not any("left_out" in line for line in read_lines(record))):
        if lost:
            reason = "" if mode == "keep" else ", as when the run was begun"
            session.terminal.warn(f"{_sentence(prompts, lost)}; they are kept{reason}")
        return None
    refuses = mode == "refuse" and not begun
    drawn = prompts if refuses else prompts.without(lost, TRAINING_ROWS)
    all_lost = lost | lost_of(answers.every(_first_rows(run, drawn)))
    if refuses and all_lost:
        raise UserError(refusal_of_rows(prompts, all_lost))
    append(record, {"prompts": digest, "left_out": sorted(lost)})
    if all_lost:
        session.terminal.say(f"{_sentence(prompts, all_lost)}; they are left out")
    return sorted(lost)


def refusal_of_rows(prompts: PromptSet, lost: Mapping[int, str]) -> str:
    """A sentence with the rows and both ways out."""
    return (
        f"{_sentence(prompts, lost)}; correct {'it' if len(lost) == 1 else 'them'}, or leave "
        f"{'it' if len(lost) == 1 else 'them'} out with --prompts.unwinnable leave_out (flowrl "
        "plan RUN --check-rows asks all rows)"
    )


def _sentence(prompts: PromptSet, lost: Mapping[int, str], place: str = TRAINING_ROWS) -> str:
    return (
        f"{place}: nothing can win {len(lost)} of {len(prompts)} rows: {rows_named(prompts, lost)}"
    )


def _recorded(record: Path, digest: str, count: int) -> list[int] | None:
    """The rows that the run has left out since it began with these prompts; None if it has not
    recorded any."""
    recorded = None
    for line in read_lines(record):
        rows = line.get("left_out")
        if isinstance(rows, list) and line.get("prompts") == digest:
            recorded = [row for row in rows if isinstance(row, int) and 0 <= row < count]
    return recorded


def _first_rows(run: RunSettings, prompts: PromptSet) -> list[int]:
    """The rows of the first iterations, as a run without a budget draws them."""
    draws = [prompts.draw(k, run.drawn, run.train.seed).rows for k in range(FIRST)]
    return list(dict.fromkeys(row for rows in draws for row in rows))
