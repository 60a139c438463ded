"""`flowrl runs`: what was trained, how far it is and what came out, read from folders alone."""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flowrl.errors import UserError, printable
from flowrl.pages.plain_files import plain_bytes
from flowrl.pages.run_folder import RunFolder
from flowrl.pages.stack import number
from flowrl.run.save.failures import TRACE
from flowrl.session.atomic import in_use
from flowrl.settings.command_line.arguments import Word

RUNS = Path("runs")
MOST_TRACE = 2**20  # bytes of a run's last traceback
_GAP = "  "
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


@dataclass
class Runs:
    """List runs, the last one that did something first: what each trains, how far it is, whether it
    is training now, its score on held-out prompts before and at its best, and its alarms. Reads
    folders, and keeps nothing."""

    folders: Word[tuple[Path, ...]] = ()
    """Folders of runs, or folders that contain some; `runs` if absent."""
    json: bool = False
    """Print a JSON object a line, for other programs."""


@dataclass(frozen=True)
class RunLine:
    """A run in a line. `state`: training, done, failed, stopped, or unreadable."""

    run: str
    recipe: str = ""
    done: int = 0
    planned: int = 0
    state: str = "unreadable"
    score: str = ""  # the held-out reward that decides which weights are best
    base: float | None = None
    best: float | None = None
    best_at: int | None = None
    alarms: int = 0
    seconds_ago: float = 0.0  # since a file of its record changed
    why: str = ""  # of a run that failed, was stopped or cannot be read

    @classmethod
    def of(cls, folder: Path) -> "RunLine":
        ago = time.time() - _changed(folder)
        try:
            run = RunFolder.read(folder)
        except UserError as error:
            return cls(str(folder), seconds_ago=ago, why=str(error))
        state, reason = _state(run)
        scores = run.column(f"held_out/{run.key}") if run.key else []
        best_at = run.best
        return cls(
            run=str(folder),
            recipe=run.recipe,
            done=run.done,
            planned=run.planned,
            state=state,
            score=run.key,
            base=scores[0][1] if scores else None,
            best=dict(scores)[best_at] if best_at is not None else None,
            best_at=best_at,
            alarms=int(run.raised),
            seconds_ago=ago,
            why=reason,
        )

    def cells(self) -> list[str]:
        held_out = ""
        if self.base is not None and self.best is not None:
            best = f"{number(self.best)} at {self.best_at}"
            held_out = f"{self.score} {number(self.base)} -> {best}"
        return [
            self.run,
            self.recipe,
            f"{self.done}/{self.planned}" if self.planned else "",
            self.state,
            held_out,
            str(self.alarms) if self.alarms else "",
            _age(self.seconds_ago),
        ]


HEADINGS = ("run", "recipe", "iterations", "state", "held-out, base -> best", "alarms", "changed")


def run_lines(folders: Sequence[Path]) -> list[RunLine]:
    """The runs in these folders, the last one that did something first. UserError for a folder that
    has no run, neither itself nor inside."""
    folders_found = list(dict.fromkeys(_found(folders or (RUNS,))))
    return sorted(
        (RunLine.of(folder) for folder in folders_found), key=lambda line: line.seconds_ago
    )


def print_runs(lines: Sequence[RunLine], *, as_json: bool) -> None:
    """Print the table, or an object a line."""
    if as_json:
        for line in lines:
            print(json.dumps(asdict(line)))
        return
    rows = [[printable(cell) for cell in line.cells()] for line in lines]
    print("\n".join(text_table([HEADINGS, *rows])))
    for line in lines:
        if line.why:
            print(printable(f"\n{line.run}: {line.why}"))


def text_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of text with columns as wide as their longest cell; an empty column is left out."""
    body = rows[1:]
    shown = [i for i in range(len(rows[0])) if any(row[i] for row in body)]
    widths = {i: max(len(row[i]) for row in rows) for i in shown}
    for row in rows:
        yield _GAP.join(row[i].ljust(widths[i]) for i in shown).rstrip()


def _found(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        if (folder / "run.yaml").is_file():
            yield folder
            continue
        if folder != RUNS and not folder.is_dir():
            raise UserError(f"runs: no folder {folder}")
        inside = sorted(folder.glob("*/run.yaml")) if folder.is_dir() else []
        if not inside:
            where = "here" if folder == RUNS else f"in {folder}"
            raise UserError(
                f"runs: no run {where}: give the folder of a run, or one that contains runs"
            )
        yield from (path.parent for path in inside)


def _state(run: RunFolder) -> tuple[str, str]:
    """The state of a run, and the reason for one that failed or was stopped. Older versions left
    a traceback alone."""
    if in_use(run.folder):
        return "training", ""
    if run.finished:
        return "done", ""
    if run.end is not None:
        return run.end.kind, run.end.cause[:300]
    trace = run.folder / TRACE
    if trace.is_file() and trace.stat().st_mtime >= _mtime(run.folder / "metrics.jsonl"):
        with suppress(OSError):
            text = (
                plain_bytes(run.folder, trace, MOST_TRACE)
                .decode("utf-8", "replace")
                .strip()
                .splitlines()
            )
            return "failed", text[-1][:300] if text else TRACE
    return "stopped", ""


def _changed(folder: Path) -> float:
    return max(_mtime(folder / name) for name in ("run.yaml", "metrics.jsonl", TRACE))


def _mtime(file: Path) -> float:
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0


def _age(seconds: float) -> str:
    """Such as `3 min ago`."""
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name} ago"
    return "now"
