"""Runs that are hacked, and healthy ones: does an alarm come in time, and is nobody accused?

    python scripts/benchmarks/alarm_runs.py --table decide    the twenty that decide
    python scripts/benchmarks/alarm_runs.py --table tune      ten others, to choose thresholds on

Each run is made once (about a minute or two of one core) and kept in `--out`. The alarms are then
replayed over its metrics.jsonl, so that a changed threshold needs no new run.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from compare import merged

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "configs" / "alarms"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=("decide", "tune"), required=True)
    parser.add_argument("--out", type=Path, default=PROJECT / "runs" / "alarms")
    given = parser.parse_args()
    common = yaml.safe_load((FOLDER / "common.yaml").read_text())
    table = yaml.safe_load((FOLDER / f"{given.table}.yaml").read_text())
    for verdict, rows in table.items():
        for name, row in rows.items():
            make(name, run_file(common, row), given.out / given.table / verdict)


if __name__ == "__main__":
    main()
