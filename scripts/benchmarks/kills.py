"""Kill runs at random moments, resume them, and compare the end with that of an unbroken run.

    python scripts/benchmarks/kills.py --out runs/kills

A case is a recipe and a number of processes. Its run is killed with SIGKILL and resumed until it
has had its kills; half of them come at any moment, half as soon as a folder is being written. Of
several processes all are killed, or one, and then the others must end by themselves. After some
kills a setting is edited: one that is free to change (the resume says nothing and ends with the
same bits), one that is free but said (one line names it; the end is that of a copy of the folder
resumed without kills), and one that never changes (exit code 2, one sentence, no file touched; once
set back, the run goes on). Weights, averages, optimizer states, the best weights and all metrics
but seconds are compared to the bit. Processes are forked from one that has imported everything;
those of the case `launch` are started by `accelerate launch`. `flowrl drill RUN` does the same with
a user's own run, in fewer trials; both compare ends with `flowrl.drill.same_end`.
"""

import argparse
import hashlib
import json
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from flowrl.drill.same_end import differences, unfinished
from flowrl.paths import PROJECT
from flowrl.session.atomic import LOCK, damage, numbered_folders
from tests.support import runs, text_runs, tiny_lm
from tests.support.warm import Process, Warm, small

IMAGES: dict[str, dict[str, Any]] = {
    "flow_grpo": {"name": "flow_grpo", "steps": 2, "group": 2, "clip": 0.2},
    "nft": {"name": "nft", "steps": 2, "group": 2, "levels_per_sample": 1},
    "branch_grpo": {"name": "branch_grpo", "steps": 3, "at": [0]},
    "mix_grpo": {"name": "mix_grpo", "steps": 4, "group": 2, "window": 2},
}
TEXT = {**text_runs.GRPO, "group": 3, "length": 4}
EDITS: dict[str, tuple[tuple[str, Any], ...]] = {
    "free": (("track.images", 2), ("checkpoint.keep", 3), ("train.self_test", "warn")),
    "said": tuple(
        (path, lambda value: value * 0.75)
        for path in ("train.lr", "train.weight_decay", "rewards.0.weight")
    ),
    "never": (
        ("evaluate.average", 0.25),
        ("model.lora", {"rank": 2, "alpha": 4.0}),
        ("recipe", {"name": "awm", "steps": 4, "group": 2, "levels_per_sample": 1}),
    ),
}


@dataclass
class Case:
    recipe: str
    processes: int
    kills: int
    edits: int
    launched: bool = False

    @property
    def name(self) -> str:
        return f"{self.recipe}-{self.processes}{'-launch' if self.launched else ''}"


@dataclass
class Count:
    kills: int = 0
    of_one: int = 0  # of several processes
    in_checkpoint: int = 0  # while a checkpoint was being written or removed
    in_other: int = 0  # while another folder was
    resumed: int = 0
    ended: int = 0
    equal: int = 0
    edits: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("free", "said", "never"), 0)
    )
    right: int = 0  # of the edits
    wrong: list[str] = field(default_factory=list)


def settings(recipe: str, place: Path, pipeline: Path, language: Path) -> dict[str, Any]:
    if recipe in IMAGES:
        tree = small(pipeline, place) | {"recipe": IMAGES[recipe]}
        if recipe == "flow_grpo":
            tree["train"]["schedule"] = {"name": "cosine", "warmup": 1}
        return tree
    tree = text_runs.tree(language, place, TEXT, updates=2)
    tree["train"]["iterations"] = 4
    tree["evaluate"] |= {"samples": 6, "per_prompt": 2, "average": 0.5}
    return tree


@dataclass
class Trial:
    """One case: its folders, and what was found."""

    case: Case
    warm: Warm
    place: Path
    config: Path
    rng: random.Random
    count: Count = field(default_factory=Count)

    def start(self, *words: Any) -> Process:
        for old in self.place.glob("out*.txt"):  # a second process appends to its own
            old.unlink()
        out = self.place / "out.txt"
        return Process(self.warm, words, out, self.case.processes, self.case.launched)

    def wrong(self, text: str) -> None:
        said = (self.place / "out.txt").read_text()[-1500:]
        self.count.wrong.append(f"{text}\n{said}")
        print(f"{self.case.name}: {text}\n{said}", flush=True)

    def whole(self) -> None:
        """Train the unbroken run, and measure how long a run lives."""
        began = time.monotonic()
        codes = self.start(self.config, "--folder", self.place / "unbroken").wait()
        assert set(codes) == {0}, (self.place / "out.txt").read_text()
        self.life = time.monotonic() - began

    def go(self) -> None:
        self.whole()
        kinds = cycle(("free", "said", "never"))
        spread = self.case.kills / max(1, self.case.edits)
        due, number = spread / 2, 0
        folder, wanted = self.place / "run0", self.place / "unbroken"
        while self.count.kills < self.case.kills:
            if self.killed(folder):
                if self.count.kills > due and whole_checkpoint(folder):
                    due += spread
                    wanted = self.edited(next(kinds), folder, wanted)
                continue
            self.compare(folder, wanted)
            number += 1
            folder, wanted = self.place / f"run{number}", self.place / "unbroken"
        if folder.exists():
            self.count.resumed += 1
            if set(self.start("--resume", folder, "--trust").wait()) != {0}:
                self.wrong("the last resume failed")
            self.compare(folder, wanted)

    def killed(self, folder: Path) -> bool:
        """Start or resume, and kill at a random moment. False if the run ended before it."""
        resumed = folder.exists()
        old = set(unfinished(folder))
        words = ("--resume", folder, "--trust") if resumed else (self.config, "--folder", folder)
        process = self.start(*words)
        self.count.resumed += resumed
        moment = time.monotonic() + self.rng.uniform(0, self.life)
        saving, alive = self.rng.random() < 0.5, True
        while alive and time.monotonic() < moment:
            time.sleep(0.002)
            alive = process.running()
        while alive and saving and not set(unfinished(folder)) - old:
            alive = process.running()
        if not alive:
            if set(process.codes()) != {0}:
                self.wrong(f"ended by itself with {process.codes()}")
            return False
        time.sleep(self.rng.uniform(0, 0.004) if saving else 0)
        several = self.case.processes > 1 and not self.case.launched
        one = self.rng.randrange(2) if several and self.rng.random() < 0.4 else None
        process.kill(one)
        new = set(unfinished(folder)) - old
        codes = process.wait()
        if None in codes:
            process.kill()
            self.wrong(f"process {codes.index(None)} did not end after the other's death")
        elif set(codes) == {0}:
            return False  # it had just ended
        self.count.kills += 1
        self.count.of_one += one is not None
        self.count.in_checkpoint += any("checkpoints" in path.parts for path, _ in new)
        self.count.in_other += bool(new) and not any("checkpoints" in p.parts for p, _ in new)
        return True

    def compare(self, folder: Path, wanted: Path) -> None:
        self.count.ended += 1
        if self.agrees(folder, wanted):
            self.count.equal += 1
            for path in {folder, wanted} - {self.place / "unbroken"}:
                shutil.rmtree(path)

    def edited(self, kind: str, folder: Path, wanted: Path) -> Path:
        """Edit a setting of a killed run, and check its resume. Returns the run to agree with."""
        self.count.edits[kind] += 1
        path, value = self.rng.choice(EDITS[kind])
        if path == "recipe" and self.case.recipe not in IMAGES:
            value = {**TEXT, "name": "text_rloo"}
        file, copy = folder / "run.yaml", self.place / f"{folder.name}-{self.count.kills}"
        before = file.read_text()
        edit(file, path, value)
        files, summary = digests(folder), ""
        if kind == "never":
            codes, errors = self.start("--resume", folder, "--trust").wait(), set(self.errors())
            touched = files.items() ^ digests(folder).items()
            right = set(codes) == {1 if self.case.launched else 2} and not touched
            right &= len(errors) == 1 and "cannot change within a run" in min(errors)
            summary = f", {sorted(dict(touched))} touched, {errors}"
            file.write_text(before)
        else:
            shutil.copytree(folder, copy)
            codes, lines = self.start("--resume", copy, "--trust").wait(), self.changes()
            # the line of a free one is that of an earlier edit, if there is any
            named = [path.removesuffix(".0.weight") in line for line in lines]
            right = set(codes) == {0} and named in ([[True]] if kind == "said" else [[], [False]])
        if kind == "free":
            right &= self.agrees(copy, wanted)
            shutil.rmtree(copy)
        self.count.right += right
        if not right:
            self.wrong(f"the edit of {path} ({kind}) ended with {codes}{summary}")
        return copy if kind == "said" else wanted

    def agrees(self, folder: Path, wanted: Path) -> bool:
        found = differences(folder, wanted)
        if found:
            self.wrong(f"{folder} differs from {wanted}: {'; '.join(found)}")
        return not found

    def errors(self) -> list[str]:
        """Sentences of errors, of all processes."""
        texts = [path.read_text() for path in sorted(self.place.glob("out*.txt"))]
        return [line for text in texts for line in text.splitlines() if "flowrl: " in line]

    def changes(self) -> list[str]:
        lines = (self.place / "out.txt").read_text().splitlines()
        return [line for line in lines if line.startswith("changed since")]


def digests(folder: Path) -> dict[str, str]:
    """Digests of a run's files but its lock."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != LOCK]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def edit(file: Path, path: str, value: Any) -> None:
    """Set one value of a run's file; a function is called with the value that it has."""
    tree = yaml.safe_load(file.read_text())
    *parts, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    inner = tree
    for part in parts:
        inner = inner[part]
    inner[last] = value(inner[last]) if callable(value) else value
    file.write_text(yaml.safe_dump(tree, sort_keys=False))


def whole_checkpoint(folder: Path) -> bool:
    return any(damage(path) is None for path in numbered_folders(folder / "checkpoints"))


def cases(scale: float) -> list[Case]:
    """200 kills and 50 edits at scale 1."""
    found = []
    for recipe in (*IMAGES, "text_grpo"):
        found += [Case(recipe, 1, 22, 6), Case(recipe, 2, 16, 4)]
    found.append(Case("flow_grpo", 2, 10, 0, launched=True))
    return [replace(c, kills=ceil(c.kills * scale), edits=ceil(c.edits * scale)) for c in found]


def table(results: dict[str, Any]) -> str:
    lines = [
        "| recipe | processes | kills | while a checkpoint was written | another folder | "
        "of one process | resumes | ends | equal to the bit | edits (free, said, never) | right |",
        "|" + "---|" * 11,
    ]
    rows = [[
        r["case"]["recipe"], f"{r['case']['processes']}{' (launch)' * r['case']['launched']}",
        r["kills"], r["in_checkpoint"], r["in_other"], r["of_one"], r["resumed"], r["ended"],
        r["equal"], *r["edits"].values(), r["right"],
    ] for r in results.values()]  # fmt: skip
    rows.append(["all", "", *(sum(row[i] for row in rows) for i in range(2, 13))])
    for row in rows:
        edits = f"{sum(row[9:12])} ({row[9]}, {row[10]}, {row[11]})"
        lines.append("| " + " | ".join(map(str, (*row[:9], edits, row[12]))) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PROJECT / "runs" / "kills")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the 200 kills")
    parser.add_argument("--only", nargs="*", help="names of cases, such as nft-2")
    parser.add_argument("--seed", type=int, default=2026)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    warm, pipeline, language = Warm(), given.out / "pipeline", given.out / "language"
    runs.write_pipeline(pipeline)
    tiny_lm.write(language)
    for case in cases(given.scale):
        if case.name in results or (given.only and case.name not in given.only):
            continue
        place = given.out / case.name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        config = runs.write(settings(case.recipe, place, pipeline, language), place)
        trial = Trial(case, warm, place, config, random.Random(f"{given.seed} {case.name}"))
        began = time.monotonic()
        trial.go()
        seconds = round(time.monotonic() - began, 1)
        results[case.name] = {"case": asdict(case), **asdict(trial.count), "seconds": seconds}
        file.write_text(json.dumps(results, indent=1))
        print(f"{case.name}: {trial.count}, {seconds} s", flush=True)
    warm.close()
    print(table(results))
    sys.exit(any(result["wrong"] for result in results.values()))


if __name__ == "__main__":
    main()
