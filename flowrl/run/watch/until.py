"""Ends of a run before its last iteration: `train.until`, and a callback's."""

from collections.abc import Mapping

from flowrl.session.progress import Progress, deciding
from flowrl.settings import RunSettings

_HOUR = 3600


def early_end(run: RunSettings, progress: Progress) -> str:
    """Why a run with these settings is done here, in a sentence; empty if it is not. A resume asks
    again, so that a farther end lets a run go on."""
    if progress.stopped:
        return "a callback asked for it"
    until = run.train.until
    if until is None:
        return ""
    if until.hours is not None and progress.seconds >= until.hours * _HOUR:
        return f"train.until: {progress.seconds / _HOUR:.2f} of {until.hours:g} hours"
    if until.samples is not None and progress.samples >= until.samples:
        return f"train.until: {progress.samples:,.0f} of {until.samples:,} samples"
    goal, counted = until.held_out, _goal(run, progress)
    if goal is None or counted is None or progress.goal != counted:
        return ""
    if progress.reached < goal.evaluations:
        return ""
    often = f" in {goal.evaluations} evaluations in a row" if goal.evaluations > 1 else ""
    return f"train.until: {counted[0]} was at least {goal.at_least:g}{often}"


def note_goal(run: RunSettings, progress: Progress, held_out: Mapping[str, float]) -> None:
    """Count an evaluation's score towards the goal, or from the start if the goal is another one
    than before."""
    goal = _goal(run, progress)
    if goal is None:
        progress.goal, progress.reached = None, 0
        return
    if progress.goal != goal:
        progress.goal, progress.reached = goal, 0
    score = held_out.get(f"held_out/{goal[0]}")
    if score is not None:
        progress.reached = progress.reached + 1 if score >= goal[1] else 0


def _goal(run: RunSettings, progress: Progress) -> tuple[str, float] | None:
    until = run.train.until
    if until is None or until.held_out is None:
        return None
    goal = until.held_out
    return goal.name or deciding(run, progress.first or {}), goal.at_least
