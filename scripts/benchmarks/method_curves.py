"""One short run of every recipe on its demo, for the curves of the methods' pages.

    python scripts/benchmarks/method_curves.py --jobs 2      about 45 minutes of one core
    python scripts/benchmarks/method_curves.py --methods nft text_grpo
    python scripts/benchmarks/method_curves.py --jobs 0      only writes docs/curves.json

Recipes of images have the settings, first trial and length of configs/compare/demo.yaml, those of
text the ones of configs/compare/text.yaml, and those of several turns those of turns.yaml; the seed
is 0. The teacher of opd is a run of the demo with adapters. A stopped run continues from its last
checkpoint, and a finished one is not repeated.
docs/curves.json has the held-out score of each evaluation. One short run of one seed does not say
which method is better: docs/methods.md compares.
"""

import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
import yaml
from compare import Job, read, work

from flowrl.recipes.table import IMAGE_RECIPES, RECIPES
from flowrl.settings.inherit import merged

PROJECT = Path(__file__).resolve().parents[2]
TABLES = PROJECT / "configs" / "compare"
CURVES = PROJECT / "docs" / "curves.json"
OWN: dict[str, dict[str, Any]] = {
    "text_riskpo": {"prompts": {"per_iteration": 30}},  # bundles of five draws
    "text_spo_tree": {"recipe": {"at": [1, 3]}},  # answers of five tokens
    "text_tempo": {"recipe": {"at": [2]}},
}
TURNS = ("text_gigpo", "text_turns", "text_rebn")
LOOKS = 8  # evaluations after the base's
SAMPLES = {"demo": 256, "text": 800, "turns": 480}  # of an evaluation


@dataclass
class Arguments:
    folder: Path = Path("runs/curves")
    methods: tuple[str, ...] = ()
    """Only these; all recipes if not given."""
    jobs: int = 2
    """Runs at a time; 0 only writes the curves of finished runs."""


def table_of(name: str) -> str:
    if name in IMAGE_RECIPES:
        return "demo"
    return "turns" if name in TURNS else "text"


def recipe_of(name: str, table: dict[str, Any]) -> dict[str, Any]:
    """The table's own settings of a recipe, or those of its first method that the recipe has."""
    own = table["methods"].get(name)
    if own is not None:
        return {"name": name, **own["settings"]["recipe"]}
    first = next(iter(table["methods"].values()))["settings"]["recipe"]
    known = inspect.signature(RECIPES[name]).parameters
    return {"name": name, **{key: value for key, value in first.items() if key in known}}


def job_of(name: str, root: Path) -> Job:
    table: dict[str, Any] = yaml.safe_load((TABLES / f"{table_of(name)}.yaml").read_text())
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


def teacher_of(root: Path) -> Job:
    """The run whose adapter opd's student follows: a short one of the demo with adapters."""
    tree = yaml.safe_load((PROJECT / "configs" / "demo_lora.yaml").read_text())
    lengths = {"train": {"iterations": 12}, "evaluate": {"every": 12}, "checkpoint": {"every": 12}}
    return Job("opd", "teacher", merged(tree, lengths), root)


def student_of(root: Path) -> Job:
    """A run of opd on the base that its teacher began with."""
    teacher, plain = teacher_of(root), job_of("flow_grpo", root).settings
    tree = merged(teacher.settings, {key: plain[key] for key in ("evaluate", "checkpoint")})
    tree |= {
        "recipe": {"name": "opd", "steps": 6, "group": 12},
        "teachers": {"folders": {"demo": str(teacher.folder / "adapter")}},
        "train": plain["train"] | {"lr": 1e-3},
    }
    return Job("opd", "seed-0", tree, root)


def curve(job: Job) -> dict[str, Any]:
    """A finished run's held-out scores, and what was spent until each."""
    table = yaml.safe_load((TABLES / f"{table_of(job.method)}.yaml").read_text())
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
    jobs = [job_of(name, root) for name in names if name not in ("text", "opd")]
    if "opd" in names:
        if given.jobs:
            teacher_of(root).run()
        jobs.append(student_of(root))
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
