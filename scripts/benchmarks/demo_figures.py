"""The README's figures: the demo's configurations over seeds, with a confirmation that is stricter.

    python scripts/benchmarks/demo_figures.py configs/demo.yaml configs/demo_lora.yaml --seeds 0 1 2

Each run is a whole process on its own. The confirmation uses prompts that neither training nor any
choice of settings saw, other noise, and a checker stricter than the reward. Each run adds a JSON
line to --out, which is read first: runs that it has are not repeated.
"""

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import tyro
from experiment import flowrl, over_seeds, read

from flowrl.settings import Run
from flowrl.settings.read import read_run

STRICTER = "{{name: {}, kind: strict, iou: 0.85, aspect: 0.8}}"


@dataclass
class Arguments:
    configs: tyro.conf.Positional[tuple[Path, ...]]
    seeds: tuple[int, ...] = (0, 1, 2)
    folder: Path = Path("runs/figures")
    out: Path = Path("runs/figures.jsonl")


def confirmed(folder: Path, weights: str, run: Run) -> float:
    judge = run.judges[0].name
    assert run.prompts.held_out is not None
    prompts = run.prompts.held_out[0].source.replace("held_out", "test")
    words = ("--prompts", prompts, "--seed", "777")
    words += ("--rewards", STRICTER.format(judge), "--samples", "564")
    said = flowrl("evaluate", folder, "--weights", weights, *words)
    found = re.search(rf"^{judge}.strict: ([\d.]+)", said, re.MULTILINE)
    assert found is not None, said
    return float(found[1])


def measure(config: Path, seed: int, folder: Path) -> dict:
    before, began = os.times(), time.monotonic()
    said = flowrl("train", config, "--folder", folder, "--train.seed", seed)
    after, wall = os.times(), time.monotonic() - began
    lines = read(folder)
    first, last = lines[0], lines[-1]
    run = read_run(config)
    judge = run.judges[0].label
    return {
        "config": config.stem,
        "seed": seed,
        "before": first[f"held_out/{judge}"],
        "after": last[f"held_out/{judge}"],
        "diversity": last["held_out/image/diversity"] / first["held_out/image/diversity"],
        "wall": wall,
        "cpu": sum(after[2:4]) - sum(before[2:4]),
        "alarms": sum(line.get("alarms", 0) for line in lines),
        "stricter_before": confirmed(folder, "base", run),
        "stricter_after": confirmed(folder, "last", run),
        "first_ratio_error": None if "self-check: old" in said else _noise_floor(said),
    }


def _noise_floor(said: str) -> float:
    found = re.search(r"largest difference ([\d.e+-]+)", said)
    assert found is not None, said
    return float(found[1])


def table(results: list[dict]) -> str:
    rows = [
        "| run | held-out strict | mean +- 95 % over seeds | gain confirmed | diversity | wall s | "
        "CPU s | alarms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for config in dict.fromkeys(r["config"] for r in results):
        own = [r for r in results if r["config"] == config]
        after = ", ".join(f"{r['after']:.3f}" for r in own)
        gains = [r["after"] - r["before"] for r in own]
        wide = over_seeds([r["after"] for r in own])
        middle = f"{mean(r['after'] for r in own):.3f}" + (
            "" if wide is None else f" +- {wide:.3f}"
        )
        kept = [
            (r["stricter_after"] - r["stricter_before"]) / g
            for r, g in zip(own, gains, strict=True)
        ]
        rows.append(
            f"| {config} | {own[0]['before']:.3f} -> {after} | {middle} | "
            f"{', '.join(f'{100 * k:.0f} %' for k in kept)} | "
            f"{min(r['diversity'] for r in own):.2f} | {mean(r['wall'] for r in own):.0f} | "
            f"{mean(r['cpu'] for r in own):.0f} | {sum(r['alarms'] for r in own):.0f} |"
        )
    return "\n".join(rows)


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    results = []
    if given.out.is_file():
        results = [json.loads(line) for line in given.out.read_text().splitlines()]
    for config in given.configs:
        for seed in given.seeds:
            if any(r["config"] == config.stem and r["seed"] == seed for r in results):
                continue
            result = measure(config, seed, given.folder / f"{config.stem}-{seed}")
            print(json.dumps(result), flush=True)
            results.append(result)
            given.out.parent.mkdir(parents=True, exist_ok=True)
            with given.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
