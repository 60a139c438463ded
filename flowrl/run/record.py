"""What a run leaves behind: its folder, `metrics.jsonl`, and one line an iteration."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker

METRICS = "metrics.jsonl"


class JsonlTracker(GeneralTracker):
    """The record of truth: one JSON object an iteration. Other trackers are mirrors of it.

    Line 0 is the base before any update; evaluations are columns of the lines where they fall.
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
        """Settings are in run.yaml."""

    def log(self, values: dict, step: int | None = None, **_: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"iteration": step, **values}) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a checkpoint must not outlive the lines before it


def cut_back(folder: Path, iteration: int) -> None:
    """Keep the lines up to an iteration: later ones will be done again, a torn last line too."""
    path = folder / METRICS
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            break
        if entry["iteration"] <= iteration:
            kept.append(line)
    replace(path, "".join(line + "\n" for line in kept))


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Terminal:
    """Prints on the main process only."""

    def __init__(self, loud: bool, iterations: int) -> None:
        self.loud, self.iterations = loud, iterations
        self.rewards: list[float] = []

    def say(self, text: str) -> None:
        if self.loud:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        if self.loud:
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def iteration(self, done: int, m: Mapping[str, float], left: float) -> None:
        """Reward with its trend over the last ten iterations, what the update did, time left."""
        self.rewards = [*self.rewards, m["reward"]][-10:]
        half = len(self.rewards) // 2
        trend = " "
        if half >= 2:
            older, newer = self.rewards[:half], self.rewards[half:]
            change = sum(newer) / len(newer) - sum(older) / len(older)
            trend = "=" if abs(change) < 0.05 * m["reward_std"] else ("+" if change > 0 else "-")
        parts = [
            f"{done:>4}/{self.iterations}",
            f"reward {m['reward']:.3f} {trend} (spread {m['reward_std']:.2f})",
        ]
        if "ratio" in m:
            clipped = m.get("clipped_low", 0.0) + m.get("clipped_high", 0.0)
            parts.append(f"ratio {m['ratio']:.4f} clipped {100 * clipped:.0f}%")
        if "kl" in m:
            parts.append(f"kl {m['kl']:.2g}")
        parts.append(f"grad {m['grad_norm']:.2g}")
        parts.append(f"{m['seconds']:.1f} s, {clock(left)} left")
        self.say("  ".join(parts))
