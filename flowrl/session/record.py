"""The record of a run, `metrics.jsonl`, and its messages."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker

from flowrl.errors import UserError
from flowrl.json_text import json_text, not_finite
from flowrl.session.atomic import reason
from flowrl.whole_file import flushed, write_whole

METRICS = "metrics.jsonl"


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
    lines = _lines(path)
    kept: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        done = iteration_of(line)
        if done is None and number < len(lines):
            warn(f"{path}, line {number} is damaged and was left out; the lines after it are kept")
        if done is not None and done <= iteration:
            if done in kept:
                warn(f"{path}, line {number} has iteration {done} again; only this one was kept")
            kept[done] = line.decode()
    missing = [number for number in range(1, iteration + 1) if number not in kept]
    if missing:
        warn(
            f"{path} has no line for {_spans(missing)} of the {iteration} iterations that the "
            "checkpoint has done; curves and pages leave them out"
        )
    if path.exists():
        write_whole(path, "".join(kept[done] + "\n" for done in sorted(kept)), synced=True)


def _lines(path: Path) -> list[bytes]:
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error
    return lines[:-1] if lines and not lines[-1] else lines


def _spans(numbers: Sequence[int]) -> str:
    """Write 1, 2, 3, 7 as "1 to 3, 7", at most ten of them."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [str(low) if low == high else f"{low} to {high}" for low, high in spans[:10]]
    return ", ".join(words) + (", ..." if len(spans) > 10 else "")


def last_iteration(path: Path) -> int:
    """The last iteration of a record, 0 without any. UserError if it cannot be read."""
    return max(
        (done for line in _lines(path) if (done := iteration_of(line)) is not None), default=0
    )


def iteration_of(line: bytes) -> int | None:
    """Iteration of a line; None for a line that is not a record."""
    try:
        entry = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    done = entry.get("iteration") if isinstance(entry, dict) else None
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
            print(text, flush=True)

    def warn(self, text: str) -> None:
        if self.loud:
            print(f"warning: {text}", file=sys.stderr, flush=True)
