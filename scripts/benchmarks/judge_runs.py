"""The demo's judge before and after training, and the image demo on the word of each of them.

    python scripts/benchmarks/judge_runs.py --folder runs/judge

Trains configs/demo_judge.yaml, then configs/demo_judged.yaml on the judge before and after its
training, with each seed; the rule checker measures. A finished run is not repeated. Overpaid: the
judge's mean word for images that the rule calls wrong.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import tyro
import yaml
from experiment import Ends, Job, ends, interval, read, work

from flowrl.paths import PROJECT


@dataclass
class Arguments:
    folder: Path = Path("runs/judge")
    seeds: tuple[int, ...] = (0, 1, 2)
    jobs: int = 1
    """Runs at a time, each with one thread."""


def runs(given: Arguments, name: str, config: str, judges: Sequence[Path | None]) -> list[Path]:
    """Train a configuration with each seed, on other judges where they are given."""
    jobs = []
    for seed, judge in zip(given.seeds, judges, strict=True):
        run: dict[str, Any] = yaml.safe_load((PROJECT / "configs" / config).read_text())
        run["train"]["seed"] = seed
        for spec in (*run["rewards"], *run.get("held_out_rewards", ())):
            if judge is not None and spec["name"] == "vlm_yes_no":
                spec["model"] = str(judge.absolute())
        jobs.append(Job(name, f"seed-{seed}", run, given.folder))
    list(work(jobs, given.jobs))
    return [job.folder for job in jobs]


def overpaid(folder: Path) -> tuple[float, float]:
    """The judge's mean word for wrong images, before and after."""
    files = sorted((folder / "report").glob("evaluation-*.json"))
    found = []
    for file in (files[0], files[-1]):
        scores = json.loads(file.read_text())["scores"]
        pairs = zip(scores["rule"], scores["judge"], strict=True)
        found.append(mean(word for right, word in pairs if right < 0.5))
    return found[0], found[1]


def row(name: str, pairs: list[Ends]) -> str:
    """Mean before; each seed after, and their mean with its 95 % interval."""
    after = [b for _, b in pairs]
    each = ", ".join(f"{value:.3f}" for value in after)
    return f"| {name} | {mean(a for a, _ in pairs):.3f} | {each} | {interval(after)} |"


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    nothing = [None] * len(given.seeds)
    judges = runs(given, "judge", "demo_judge.yaml", nothing)
    lines = ["| | before | seeds | mean (95 % over seeds) |", "|---|---|---|---|"]
    lines.append(
        row("judge: right answers", [ends(read(f), "held_out/exact_answer.text") for f in judges])
    )
    for name, some in (("before", nothing), ("trained", [f / "model" for f in judges])):
        images = runs(given, f"image_{name}", "demo_judged.yaml", some)
        for metric in ("rule", "judge"):
            found = [ends(read(f), f"held_out/{metric}") for f in images]
            lines.append(row(f"images on the judge {name}: by the {metric}", found))
        lines.append(row(f"images on the judge {name}: overpaid", [overpaid(f) for f in images]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
