"""Parts that experiments over several seeds share: runs that go on where they stopped, metrics that
are read of them, and tables over seeds."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeVar

import yaml
from scipy.stats import t as student

from flowrl.session.record import METRICS
from flowrl.whole_file import write_whole

T = TypeVar("T")
Curve = list[dict[str, float]]  # a run's metrics, line by line
Ends = tuple[float, float]  # a metric before and after training
GAIN_HEAD = "| held-out | before | after | gain (95 % over seeds) |\n|---|---|---|---|"


def flowrl(*words: object) -> str:
    """Run a command in a process of its own, with one thread, and return its output. RuntimeError
    with the end of it if the command fails."""
    command = [sys.executable, "-m", "flowrl", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    said = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said[-4000:]}")
    return said


@dataclass(frozen=True)
class Job:
    """One training run: a method with one set of settings and one seed."""

    method: str
    name: str  # trial-0, seed-0
    settings: dict[str, Any] = field(hash=False)
    root: Path

    @property
    def folder(self) -> Path:
        return self.root / self.method / self.name

    @property
    def done(self) -> bool:
        lines = read(self.folder)
        return bool(lines) and lines[-1]["iteration"] == self.settings["train"]["iterations"]

    def run(self) -> None:
        """Train from the beginning or from the last checkpoint; a finished run is not repeated."""
        if self.done:
            return
        if self.folder.exists():
            flowrl("train", "--resume", self.folder)
            return
        file = self.root / self.method / f"{self.name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, yaml.safe_dump(self.settings, sort_keys=False))
        flowrl("train", file, "--folder", self.folder)


def work(jobs: Sequence[Job], at_a_time: int) -> Iterator[Job]:
    """Run the jobs; yields each as it ends."""
    with ThreadPoolExecutor(at_a_time) as pool:
        waiting = {pool.submit(job.run): job for job in jobs}
        for future in as_completed(waiting):
            future.result()
            yield waiting[future]


def with_seeds(seeds: Sequence[int], trained: Callable[[int], T]) -> list[T]:
    """Results of a run in this process with each seed, printed with their processor time."""
    results = []
    for seed in seeds:
        began = time.process_time()
        results.append(trained(seed))
        print(f"seed {seed}: {results[-1]}, {time.process_time() - began:.0f} CPU s", flush=True)
    return results


def read(folder: Path) -> Curve:
    """The lines of a run's metrics; none if it has not begun."""
    file = folder / METRICS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ends(lines: Curve, metric: str) -> Ends:
    """A metric of the first and the last line that have it."""
    values = [line[metric] for line in lines if metric in line]
    return values[0], values[-1]


def over_seeds(values: Sequence[float]) -> float | None:
    """Half of the 95 % t-interval of the mean over seeds; None for a single one."""
    if len(values) < 2:
        return None
    return float(student.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def interval(values: Sequence[float], form: str = ".3f") -> str:
    """A mean with its 95 % interval over seeds."""
    wide, middle = over_seeds(values), mean(values)
    if wide is None:
        return f"{middle:{form}} (one seed)"
    return f"{middle:{form}} ({middle - wide:{form}} to {middle + wide:{form}})"


def gain_row(name: str, pairs: Sequence[Ends]) -> str:
    """A row of GAIN_HEAD: before, after with each seed, and the gain."""
    after = ", ".join(f"{end:.3f}" for _, end in pairs)
    gains = interval([end - begin for begin, end in pairs], "+.3f")
    return f"| {name} | {pairs[0][0]:.3f} | {after} | {gains} |"


def write_between(page: Path, mark: str, text: str) -> None:
    """Replace what stands between the marks of a table in a page."""
    before, rest = page.read_text().split(f"<!-- {mark} -->\n")
    _, after = rest.split(f"<!-- end of {mark} -->")
    page.write_text(f"{before}<!-- {mark} -->\n{text}\n<!-- end of {mark} -->{after}")
