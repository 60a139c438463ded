"""The record of a run, `metrics.jsonl`, and its messages."""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker

from flowrl.bounded_files import bounded_lines, json_object
from flowrl.errors import UserError, terminal_text
from flowrl.json_text import json_text, not_finite
from flowrl.session.atomic import reason
from flowrl.whole_file import flushed, write_whole

METRICS = "metrics.jsonl"
MOST_METRICS = 2**28  # bytes: a hundred thousand iterations with eighty metrics
_MOST_SAID = 20  # warnings of lines of one file


class JsonlTracker(GeneralTracker):
    """The authoritative record: one JSON object per iteration. Other trackers copy it.

    A number that is not finite is null, and `not_finite` counts them.
    Line 0 is the base model before any update; evaluations are columns of their iteration's line.
    What is logged again for the last iteration takes the place of its line.
    """

    name = "jsonl"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / METRICS
        self.last: tuple[int | None, int] = (None, 0)  # its iteration, and where its line begins

    @property
    def tracker(self) -> Path:
        return self.path

    def store_init_configuration(self, values: dict) -> None:
        """Do nothing, since settings are in run.yaml."""

    def log(self, values: dict, step: int | None = None, **_: Any) -> None:
        line: dict[str, Any] = {"iteration": step, **values}
        if count := not_finite(values):
            line["not_finite"] = count  # they are null in the line
        with self.path.open("a") as file:
            if step is not None and step == self.last[0]:
                file.truncate(self.last[1])
                file.seek(self.last[1])
            self.last = step, file.tell()
            file.write(json_text(line) + "\n")
            flushed(file)  # a checkpoint must not outlive the lines before it


def cut_back(folder: Path, iteration: int, warn: Callable[[str], None]) -> None:
    """Keep one line for each iteration up to this one, since later ones will be repeated.

    A line that is unreadable, or has an iteration again, is left out with a warning, except the
    last line: a killed process may leave it incomplete, and its iteration is repeated. Iterations
    without a line are named. UserError if the file cannot be read.
    """
    path = folder / METRICS
    records: dict[int, str] = {}
    damaged = 0  # the number of a damaged line, until a line follows it
    said = 0
    for number, line in enumerate(_lines(path), 1):
        if damaged and (said := said + 1) <= _MOST_SAID:
            warn(f"{path}, line {damaged} is damaged and was left out; the lines after it are kept")
        done = iteration_of(line)
        damaged = number if done is None else 0
        if done is not None and done <= iteration:
            if done in records and (said := said + 1) <= _MOST_SAID:
                warn(f"{path}, line {number} has iteration {done} again; only this one was kept")
            records[done] = line.decode()
    if said > _MOST_SAID:
        warn(f"{path}: {said - _MOST_SAID} further lines are damaged or double")
    if missing := _missing(sorted(records), iteration):
        several = "" if missing == [(missing[0][0],) * 2] else "s"
        warn(
            f"{path} has no line for iteration{several} {_spans(missing)}, of the {iteration} that "
            "the checkpoint has done; curves and pages leave them out"
        )
    if path.exists():
        write_whole(path, "".join(records[done] + "\n" for done in sorted(records)), synced=True)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        yield from bounded_lines(path, MOST_METRICS) if path.exists() else ()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}; move it away") from error


def _missing(iterations: Sequence[int], last: int) -> list[tuple[int, int]]:
    """The first and last number of each gap in 1..last. `iterations` increase, up to `last`."""
    bounds = [0, *(number for number in iterations if number > 0), last + 1]
    return [(a + 1, b - 1) for a, b in pairwise(bounds) if b - a > 1]


def _spans(spans: Sequence[tuple[int, int]]) -> str:
    """Write spans as "1 to 3, 7", at most ten of them."""
    words = [str(low) if low == high else f"{low} to {high}" for low, high in spans[:10]]
    return ", ".join(words) + (", ..." if len(spans) > 10 else "")


def last_iteration(path: Path) -> int:
    """The last iteration of a record, 0 without any. UserError if it cannot be read."""
    return max(
        (done for line in _lines(path) if (done := iteration_of(line)) is not None), default=0
    )


def iteration_of(line: bytes) -> int | None:
    """Iteration of a line; None for a line that is not a record."""
    if b"iteration" not in line:
        return None
    done = (json_object(line) or {}).get("iteration")
    return done if isinstance(done, int) and not isinstance(done, bool) else None


def clock(seconds: float) -> str:
    """Format seconds as m:ss, or h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Terminal:
    """Prints messages on the main process only."""

    def __init__(self, loud: bool) -> None:
        self.loud = loud

    def say(self, text: str) -> None:
        if self.loud:
            print(terminal_text(text), flush=True)

    def warn(self, text: str) -> None:
        if self.loud:
            print(terminal_text(f"warning: {text}"), file=sys.stderr, flush=True)
