"""All recipes from the same base, with the same number of trials each: one figure and one table.

    python scripts/benchmarks/compare.py            # hours; can be stopped and started again
    python scripts/benchmarks/compare.py --jobs 0   # only report finished runs

Each run is a process of its own with one thread. A stopped run continues from its last
checkpoint; a finished one is not repeated. FOLDER/results.json, table.md and curves.png are
rewritten after every finished run.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
import yaml
from compare_report import Looks, report
from experiment import Job, read, work

from flowrl.settings.file.inherit import merged

KEPT = 0.9  # of the base's diversity: a trial below it is not chosen


@dataclass
class Arguments:
    table: Path = Path("configs/compare/demo.yaml")
    folder: Path = Path("runs/compare")
    methods: tuple[str, ...] = ()
    """Only these; all of the table if not given."""
    jobs: int = 2
    """Runs at a time; 0 only reports."""


def settings(table: dict, method: str, own: dict, looks: int, seed: int) -> dict[str, Any]:
    """A run's file; it is evaluated about `looks` times. A trial, evaluated once, is shorter."""
    length = table["methods"][method]["trial_iterations" if looks == 1 else "iterations"]
    every = max(1, length // looks)
    chosen = merged(merged(table["common"], table["methods"][method]["settings"]), own)
    chosen["recipe"] = {"name": table["methods"][method].get("recipe", method), **chosen["recipe"]}
    lengths = {
        "train": {"iterations": length, "seed": seed},
        "evaluate": {"every": every},
        "checkpoint": {"every": every, "keep": 1},
    }
    return merged(lengths, merged(chosen, lengths))


def trials(table: dict, method: str, root: Path) -> list[Job]:
    """Runs that choose a method's settings; none where there is no choice."""
    row = table["methods"][method]
    if len(row["trials"]) == 1:
        return []
    return [
        Job(
            method,
            f"trial-{i}",
            settings(table, method, own, 1, table["trial_seed"]),
            root,
        )
        for i, own in enumerate(row["trials"])
    ]


def chosen(jobs: list[Job], looks: Looks) -> int | None:
    """The place of the most accurate trial that keeps its diversity; None while one is missing.

    If none does, it is the one that keeps most. Without trials it is the only settings' place.
    """
    if not jobs:
        return 0
    if not all(job.done for job in jobs):
        return None
    ends = [read(job.folder) for job in jobs]
    accuracy = [lines[-1][looks.metric] for lines in ends]
    if looks.keep is None:
        return max(range(len(jobs)), key=accuracy.__getitem__)
    kept = [lines[-1][looks.keep] / lines[0][looks.keep] for lines in ends]
    fit = [i for i in range(len(jobs)) if kept[i] >= KEPT]
    if not fit:
        return max(range(len(jobs)), key=kept.__getitem__)
    return max(fit, key=accuracy.__getitem__)


def final_runs(table: dict, method: str, root: Path) -> list[Job]:
    row = table["methods"][method]
    best = chosen(trials(table, method, root), Looks(**table["looks"]))
    if best is None:
        return []
    own, looks = row["trials"][best], table["evaluations"]
    return [
        Job(method, f"seed-{s}", settings(table, method, own, looks, s), root)
        for s in table["seeds"]
    ]


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    table = yaml.safe_load(given.table.read_text())
    wrong = set(given.methods) - set(table["methods"])
    if wrong:
        known = ", ".join(table["methods"])
        sys.exit(f"{given.table} has no {', '.join(sorted(wrong))}; it has {known}")
    methods = [m for m in table["methods"] if not given.methods or m in given.methods]
    given.folder.mkdir(parents=True, exist_ok=True)

    def tell() -> None:
        runs = {m: final_runs(table, m, given.folder) for m in methods}
        looks = Looks(**table["looks"])
        results = {
            m: {
                "trials": len(table["methods"][m]["trials"]),
                "chosen": chosen(trials(table, m, given.folder), looks),
                "curves": [read(job.folder) for job in jobs if job.done],
            }
            for m, jobs in runs.items()
        }
        report(given.folder, results, looks)

    if given.jobs:
        tried = [job for m in methods for job in trials(table, m, given.folder)]
        for job in work(tried, given.jobs):
            print(f"{job.method} {job.name}", flush=True)
        finals = [final_runs(table, m, given.folder) for m in methods]
        order = [job for same_seed in zip(*finals, strict=True) for job in same_seed]
        for job in work(order, given.jobs):
            print(f"{job.method} {job.name}", flush=True)
            tell()
    tell()
    print((given.folder / "table.md").read_text())


if __name__ == "__main__":
    main()
