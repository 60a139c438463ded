"""The record of a run: `metrics.jsonl`, and a panel or one line per iteration on the terminal."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker
from rich.console import Console

from flowrl.errors import UserError
from flowrl.run.atomic import flushed, reason
from flowrl.run.watch.footer import Footer, suits
from flowrl.run.watch.panel import (
    HEIGHT,
    MOST_REWARDS,
    HeldOutScore,
    PanelFacts,
    clock,
    given_line,
    panel_lines,
)

METRICS = "metrics.jsonl"
TREND = (
    "+ - = after a reward: it rose, fell or stayed (by less than 5 % of the spread) over the last "
    "ten iterations"
)


class JsonlTracker(GeneralTracker):
    """The authoritative record: one JSON object per iteration. Other trackers mirror it.

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
        """Do nothing: settings are in run.yaml."""

    def log(self, values: dict, step: int | None = None, **_: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"iteration": step, **values}) + "\n")
            flushed(file)  # a checkpoint must not outlive the lines before it


def cut_back(folder: Path, iteration: int, warn: Callable[[str], None]) -> None:
    """Keep the lines up to an iteration, since later ones will be done again.

    A line that cannot be read is left out with a warning, but for the last one: a killed process
    may leave it torn, and its iteration is done again. UserError if the file cannot be read.
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
            warn(f"{path}, line {number} is damaged and left out; the lines after it are kept")
        if done is not None and done <= iteration:
            kept.append(line.decode())
    replace(path, "".join(line + "\n" for line in kept))


def iteration_of(line: bytes) -> int | None:
    """Read the iteration of a line; None for a line that is not one of a record."""
    try:
        entry = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    done = entry.get("iteration") if isinstance(entry, dict) else None
    return done if isinstance(done, int) and not isinstance(done, bool) else None


def replace(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("w") as file:
        file.write(text)
        flushed(file)
    beside.rename(path)


class Terminal:
    """Messages and progress, printed on the main process only."""

    def __init__(self, loud: bool, iterations: int) -> None:
        self.loud, self.iterations = loud, iterations
        self.rewards: list[float] = []
        self.explained = False
        self.facts: PanelFacts | None = None  # while the panel is drawn

    def say(self, text: str) -> None:
        if self.loud:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        if self.loud:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def panel(self, facts: PanelFacts, device: str) -> Iterator[None]:
        """Draw one live panel instead of a line per iteration, if standard output is a terminal.

        All other output scrolls above it. The last iteration's line remains on the terminal.
        """
        if not self.loud or not suits(sys.stdout, HEIGHT):
            yield
            return
        self.facts, self.line = facts, ""
        console = Console(file=sys.stdout, force_terminal=True)

        def lines(width: int) -> list[str]:
            return panel_lines(self.facts or facts, device, width, console)

        footer = Footer(sys.stdout.fileno(), HEIGHT, lines)
        footer.open()
        try:
            yield
        finally:
            footer.close()
            self.facts = None
            if self.line:
                self.say(self.line)

    def held_out(self, scores: tuple[HeldOutScore, ...]) -> None:
        """Show an evaluation on the panel."""
        if self.facts is not None:
            self.facts = changed(self.facts, held_out=scores)

    def iteration(self, done: int, m: Mapping[str, float], elapsed: float) -> None:
        """Show the reward with its trend, the update's metrics, elapsed and remaining time.

        `elapsed`: seconds of all iterations so far.
        """
        trend = " "
        if "reward" in m:  # without one all samples are given
            self.rewards = [*self.rewards, m["reward"]][-MOST_REWARDS:]
            trend = self._trend(m["reward_std"])
        line = self._line(done, m, elapsed, trend)
        if self.facts is None:
            self.say(line)
            return
        self.line = line
        rewards = tuple(self.rewards)
        shown = {"done": done, "metrics": dict(m), "rewards": rewards, "trend": trend}
        self.facts = changed(self.facts, **shown, elapsed=elapsed, at=time.monotonic())

    def _trend(self, spread: float) -> str:
        recent = self.rewards[-10:]
        half = len(recent) // 2
        if half < 2:
            return " "
        if not self.explained:
            self.say(TREND)
            self.explained = True
        older, newer = recent[:half], recent[half:]
        change = sum(newer) / len(newer) - sum(older) / len(older)
        return "=" if abs(change) < 0.05 * spread else ("+" if change > 0 else "-")

    def _line(self, done: int, m: Mapping[str, float], elapsed: float, trend: str) -> str:
        left = elapsed / done * (self.iterations - done)
        parts = [
            f"{done:>4}/{self.iterations}",
            f"reward {m['reward']:.3f} {trend} (spread {m['reward_std']:.2f})"
            if "reward" in m
            else given_line(m),
        ]
        if "ratio" in m:
            clipped = m.get("clipped_low", 0.0) + m.get("clipped_high", 0.0)
            parts.append(f"ratio {m['ratio']:.4f} clipped {100 * clipped:.0f}%")
        if "kl" in m:
            parts.append(f"kl {m['kl']:.2g}")
        parts.append(f"grad {m['grad_norm']:.2g}")
        parts.append(f"{m['seconds']:.1f} s, {clock(elapsed)} so far, {clock(left)} left")
        return "  ".join(parts)
