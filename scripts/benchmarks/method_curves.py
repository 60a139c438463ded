"""One short run of every recipe on its demo, for the curves of the methods' pages.

    python scripts/benchmarks/method_curves.py --jobs 2      about 45 minutes of one core
    python scripts/benchmarks/method_curves.py --methods nft text_grpo
    python scripts/benchmarks/method_curves.py --jobs 0      only writes docs/curves.json

Recipes of images have the settings, first trial and length of configs/compare/demo.yaml, those of
text the ones of configs/compare/text.yaml, and those of several turns those of turns.yaml; the seed
is 0. A stopped run continues from its last checkpoint, and a finished one is not repeated. The
newer recipes of images, of feedback.yaml and gradients.yaml, have no runs of their own: their
curves are the first seeds of compare.py's runs in the folders runs/feedback and runs/gradients.
docs/curves.json has the held-out score of each evaluation. One short run of one seed does not say
which method is better: docs/results/methods.md compares.
"""

import inspect
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tyro
import yaml
from compare import final_runs
from experiment import Job, read, work

from flowrl.recipes.table import IMAGE_RECIPES, RECIPES
from flowrl.settings.file.inherit import merged

PROJECT = Path(__file__).resolve().parents[2]
TABLES = PROJECT / "configs" / "compare"
CURVES = PROJECT / "docs" / "curves.json"
OWN: dict[str, dict[str, Any]] = {
    "text_riskpo": {"prompts": {"per_iteration": 30}},  # bundles of five draws
    "text_spo_tree": {"recipe": {"at": [1, 3]}},  # answers of five tokens
    "text_tempo": {"recipe": {"at": [2]}},
}
COMPARED = ("feedback", "gradients")  # comparisons whose runs are taken
TURNS = ("text_gigpo", "text_turns", "text_rebn", "text_process", "text_igpo")
LOOKS = 8  # evaluations after the base's
SAMPLES = {"demo": 256, "text": 800, "turns": 480}  # of an evaluation


@dataclass
class Arguments:
    folder: Path = Path("runs/curves")
    methods: tuple[str, ...] = ()
    """Only these; all recipes if not given."""
    jobs: int = 2
    """Runs at a time; 0 only writes the curves of finished runs."""
    compared: Path = Path("runs")
    """Where compare.py has written its folders feedback and gradients."""


def table_of(name: str) -> str:
    """The comparison whose settings a recipe has."""
    if name not in IMAGE_RECIPES:
        return "turns" if name in TURNS else "text"
    return next((t for t in COMPARED if name in read_table(t)["methods"]), "demo")


@cache
def read_table(name: str) -> dict[str, Any]:
    return yaml.safe_load((TABLES / f"{name}.yaml").read_text())


def compared(name: str, root: Path) -> Job:
    """The first seed of a comparison's runs."""
    table = table_of(name)
    jobs = final_runs(read_table(table), name, root / table)
    if not jobs or not jobs[0].done:
        command = f"compare.py --table configs/compare/{table}.yaml --folder {root / table}"
        sys.exit(f"{name} is not compared yet: python scripts/benchmarks/{command}")
    return jobs[0]


def recipe_of(name: str, table: dict[str, Any]) -> dict[str, Any]:
    """The table's own settings of a recipe, or those of its first method that the recipe has."""
    own = table["methods"].get(name)
    if own is not None:
        return {"name": name, **own["settings"]["recipe"]}
    first = next(iter(table["methods"].values()))["settings"]["recipe"]
    known = inspect.signature(RECIPES[name]).parameters
    return {"name": name, **{key: value for key, value in first.items() if key in known}}


def job_of(name: str, root: Path) -> Job:
    table = read_table(table_of(name))
    row = table["methods"].get(name) or next(iter(table["methods"].values()))
    length = row["trial_iterations"]
    every = max(1, length // LOOKS)
    tree = merged(table["common"], row["settings"]) | {"recipe": recipe_of(name, table)}
    lengths = {
        "train": {"iterations": length, "seed": 0},
        "evaluate": {"every": every, "samples": SAMPLES[table_of(name)]},
        "checkpoint": {"every": every, "keep": 1},
    }
    return Job(name, "seed-0", merged(merged(tree, lengths), OWN.get(name, {})), root)


def curve(job: Job) -> dict[str, Any]:
    """A finished run's held-out scores, and what was spent until each."""
    table = read_table(table_of(job.method))
    metric, spent, points = table["looks"]["metric"], 0.0, []
    for line in read(job.folder):
        spent += line.get("count/sampling", 0.0)
        if metric in line:
            points.append([int(line["iteration"]), round(line[metric], 4), round(spent)])
    samples = job.settings["evaluate"]["samples"]
    return {"score": metric.removeprefix("held_out/"), "samples": samples, "points": points}


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    if wrong := set(given.methods) - set(RECIPES):
        sys.exit(f"no recipe is called {', '.join(sorted(wrong))}: see docs/recipes.md")
    names = [name for name in RECIPES if not given.methods or name in given.methods]
    root = given.folder.resolve()
    newer = [name for name in names if table_of(name) in COMPARED]
    jobs = [job_of(name, root) for name in names if name not in ("text", *newer)]
    jobs += [compared(name, given.compared.resolve()) for name in newer]
    kept = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    for job in work(jobs, given.jobs) if given.jobs else [job for job in jobs if job.done]:
        kept[job.method] = curve(job)
        ordered = {name: kept[name] for name in RECIPES if name in kept}
        lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in ordered.items()]
        CURVES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{job.method}: {kept[job.method]['points'][0][1]} -> "
              f"{kept[job.method]['points'][-1][1]}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
