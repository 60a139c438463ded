"""Measurements of the benchmark suites: iterations of opened runs, by turns."""

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flowrl.cli.floor import Opened
from flowrl.paths import PROJECT
from flowrl.settings.file.inherit import merged
from flowrl.settings.read import run_from

QUIET = {"train": {"iterations": 1000, "alarms": "off", "self_test": "off"}}


def settings_of(config: str, *changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a file of the project with changes."""
    tree: dict[str, Any] = yaml.safe_load((PROJECT / config).read_text())
    for change in (*changes, QUIET):
        tree = merged(tree, change)
    return tree


def by_turns(arms: Mapping[str, Any], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each arm's turns; the arms take turns."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            found[name].append(arm.turn())
    return found


def beside(
    tree: dict[str, Any], changes: Mapping[str, Mapping[str, Any]], repeats: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Seconds of a run's iterations with each of the changes, by turns, and their last metrics."""
    with tempfile.TemporaryDirectory() as name:
        arms = {
            arm: Opened.of(run_from(merged(tree, change), "suites"), Path(name) / str(place))
            for place, (arm, change) in enumerate(changes.items())
        }
        found = by_turns(arms, repeats)
    return found, {arm: kept.metrics[-1] for arm, kept in arms.items()}


def power_law(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, list[float]]:
    """The exponent of a least-squares fit seconds = a size^p, and the exponent of each step."""
    x, y = [math.log(n) for n in sizes], [math.log(s) for s in seconds]
    slope = statistics.linear_regression(x, y).slope
    steps = [(y[i + 1] - y[i]) / (x[i + 1] - x[i]) for i in range(len(x) - 1)]
    return slope, steps
