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
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from flowrl.run.watch.alarms import Alarms
from flowrl.session.record import METRICS
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


def make(name: str, tree: dict[str, Any], out: Path) -> None:
    folder = out / name
    if (folder / "done").exists():
        return
    file = out / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    words = ["--resume", str(folder)] if folder.exists() else [str(file), "--folder", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "flowrl", "train", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (out / f"{name}.log").write_text(done.stdout + done.stderr)
    if done.returncode == 0:
        (folder / "done").touch()
    print(f"{name}: exit code {done.returncode}", flush=True)


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


def replayed(table: dict[str, Any], out: Path) -> str:
    """The table of all runs that are finished, and its sums."""
    runs: list[Replayed] = []
    for verdict, rows in table.items():
        for name in rows:
            folder = out / verdict / name
            if (folder / "done").exists():
                lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
                runs.append(replay(name, verdict == "hacked", lines))
    hacked, healthy = ([run for run in runs if run.hacked is kind] for kind in (True, False))
    found, accused = sum(run.right for run in hacked), sum(not run.right for run in healthy)
    sums = f"{found} of {len(hacked)} hacked runs raise an alarm in time; "
    sums += f"{accused} of {len(healthy)} healthy runs raise one."
    return "\n".join([HEAD, *(run.row for run in runs), "", sums])


def write_page(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of a table in a page."""
    before, rest = page.read_text().split(f"<!-- {name} -->\n")
    _, after = rest.split(f"<!-- end of {name} -->")
    page.write_text(f"{before}<!-- {name} -->\n{text}\n<!-- end of {name} -->{after}")


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
    out = given.out / given.table
    if given.replay:
        text = replayed(table, out)
        print(text)
        if given.page:
            write_page(given.page, given.table, text)
        return
    for verdict, rows in table.items():
        for name, row in rows.items():
            make(name, run_file(common, row), out / verdict)


if __name__ == "__main__":
    main()
