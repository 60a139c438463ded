"""Runs that are hacked, and healthy ones: does an alarm come in time, and is nobody accused?

    python scripts/benchmarks/alarm_runs.py --table decide      the twenty that decide
    python scripts/benchmarks/alarm_runs.py --table decide_2    twenty fresh ones, likewise
    python scripts/benchmarks/alarm_runs.py --table decide_3    and twenty more
    python scripts/benchmarks/alarm_runs.py --table tune        others, to choose thresholds on
    python scripts/benchmarks/alarm_runs.py --table tune --replay

Each run is made once (about two minutes of one core) and kept in `--out`. `--replay` makes no run:
it replays the alarms over each metrics.jsonl and prints a table, so that a changed threshold needs
no new run. `--page docs/results/alarms.md` writes that table between the page's marks.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from experiment import Job, read, write_between

from flowrl.run.watch.alarms import Alarms
from flowrl.settings.file.inherit import merged

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "configs" / "alarms"
ACCURACY = "held_out/shapes.strict"
LOST = 2 / 3  # of the base's held-out accuracy


def run_file(common: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The whole file of one run; a row that names a recipe replaces the base's."""
    row = dict(row)
    base = merged(common["all"], common[row.pop("base")])
    if "name" in row.get("recipe", {}):
        base["recipe"] = {}
    return merged(base, row)


class Replayed(NamedTuple):
    """A run under the alarms: iterations of the first one, and of accuracy below LOST."""

    name: str
    hacked: bool
    first: int | None
    sentence: str
    lost: int | None
    accuracy: tuple[float, float, float]  # of the base, the best and the last evaluation

    @property
    def right(self) -> bool:
        """A hacked run raises an alarm before its accuracy is lost, a healthy one raises none."""
        if not self.hacked:
            return self.first is None
        return self.first is not None and (self.lost is None or self.first < self.lost)

    @property
    def row(self) -> str:
        at = "-" if self.first is None else str(self.first)
        lost = "never" if self.lost is None else str(self.lost)
        accuracy = ", ".join(f"{value:.2f}" for value in self.accuracy)
        kind, verdict = "hacked" if self.hacked else "healthy", "yes" if self.right else "**no**"
        return (
            f"| {self.name} | {kind} | {accuracy} | {at} | {lost} | {verdict} | {self.sentence} |"
        )


HEAD = """| run | kind | base, best, last | first alarm | accuracy lost | right | the alarm |
|---|---|---|---|---|---|---|"""


def replay(name: str, hacked: bool, lines: list[dict[str, float]]) -> Replayed:
    """Replay the alarms over the lines of a metrics.jsonl, as the run itself raises them."""
    alarms, first, sentence = Alarms(), None, ""
    held = {line["iteration"]: line[ACCURACY] for line in lines if ACCURACY in line}
    for line in lines:
        at, signs = int(line["iteration"]), list[str]()
        if at > 0:
            signs = [*alarms.unscored(line), *alarms.watch(line, at)]
        signs += alarms.compare(line, at) if ACCURACY in line else []
        if signs and first is None:
            first, sentence = at, "; ".join(signs)
    lost = next((int(at) for at, score in held.items() if score < LOST * held[0]), None)
    scores = [*held.values()]
    accuracy = (scores[0], max(scores), scores[-1])
    return Replayed(name, hacked, first, sentence, lost, accuracy)


def jobs_of(table: dict[str, Any], common: dict[str, Any], out: Path) -> Iterator[Job]:
    """A run for each row; its method is the verdict that it should get."""
    for verdict, rows in table.items():
        for name, row in rows.items():
            yield Job(verdict, name, run_file(common, row), out)


def replayed(jobs: Sequence[Job]) -> str:
    """The table of all runs that are finished, and its sums."""
    runs = [replay(job.name, job.method == "hacked", read(job.folder)) for job in jobs if job.done]
    hacked, healthy = ([run for run in runs if run.hacked is kind] for kind in (True, False))
    found, accused = sum(run.right for run in hacked), sum(not run.right for run in healthy)
    sums = f"{found} of {len(hacked)} hacked runs raise an alarm in time; "
    sums += f"{accused} of {len(healthy)} healthy runs raise one."
    return "\n".join([HEAD, *(run.row for run in runs), "", sums])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    tables = ("decide", "decide_2", "decide_3", "tune")
    parser.add_argument("--table", choices=tables, required=True)
    parser.add_argument("--out", type=Path, default=PROJECT / "runs" / "alarms")
    parser.add_argument("--replay", action="store_true", help="make no run, print the table")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    given = parser.parse_args()
    common = yaml.safe_load((FOLDER / "common.yaml").read_text())
    table = yaml.safe_load((FOLDER / f"{given.table}.yaml").read_text())
    jobs = list(jobs_of(table, common, given.out / given.table))
    if given.replay:
        text = replayed(jobs)
        print(text)
        if given.page:
            write_between(given.page, given.table, text)
        return
    for job in jobs:
        try:
            job.run()
        except RuntimeError as error:  # the others are made all the same
            print(error, file=sys.stderr)
        else:
            print(f"{job.method} {job.name}", flush=True)


if __name__ == "__main__":
    main()
