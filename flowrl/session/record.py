"""The record of a run, `metrics.jsonl`, and its messages."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker

from flowrl.errors import UserError
from flowrl.session.atomic import flushed, reason

METRICS = "metrics.jsonl"


class JsonlTracker(GeneralTracker):
    """The authoritative record: one JSON object per iteration. Other trackers copy it.

    Line 0 is the base model before any update; evaluations are columns of their iteration's line.
    """

    name = "jsonl"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / METRICS

    @property
    def tracker(self) -> Path:
        return self.path

    def store_init_configuration(self, values: dict) -> None:
        """Do nothing, since settings are in run.yaml."""

    def log(self, values: dict, step: int | None = None, **_: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"iteration": step, **values}) + "\n")
            flushed(file)  # a checkpoint must not outlive the lines before it


def cut_back(folder: Path, iteration: int, warn: Callable[[str], None]) -> None:
    """Keep only lines up to an iteration, since later ones will be repeated.

    An unreadable line is left out with a warning, except the last line: a killed process may leave
    it incomplete, and its iteration is repeated. UserError if the file cannot be read.
    """
    path = folder / METRICS
    if not path.exists():
        return
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error
    lines = lines[:-1] if not lines[-1] else lines
    kept: list[str] = []
    for number, line in enumerate(lines, 1):
        done = iteration_of(line)
        if done is None and number < len(lines):
            warn(f"{path}, line {number} is damaged and was left out; the lines after it are kept")
        if done is not None and done <= iteration:
            kept.append(line.decode())
    replace(path, "".join(line + "\n" for line in kept))


def last_iteration(path: Path) -> int:
    """The last iteration of a record, 0 without any. UserError if it cannot be read."""
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason(error)}") from error
    return max((done for line in lines if (done := iteration_of(line)) is not None), default=0)


def iteration_of(line: bytes) -> int | None:
    """Iteration of a line; None for a line that is not a record."""
    try:
        entry = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    done = entry.get("iteration") if isinstance(entry, dict) else None
    return done if isinstance(done, int) and not isinstance(done, bool) else None


def replace(path: Path, text: str) -> None:
    """Write a file completely or not at all."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("w") as file:
        file.write(text)
        flushed(file)
    beside.rename(path)


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
