"""Folders of runs for tests of pages: written by hand, with prompts that mean harm."""

import json
from dataclasses import replace
from pathlib import Path

import torch
import yaml

from flowrl.media.thumbnails import small_copy
from flowrl.pages.records import (
    AlarmRecord,
    EvaluationRecord,
    LaunchRecord,
    LevelRecord,
    SampleRecord,
    TreeRecord,
    append_record,
    write_record,
)

SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"
RTL = "كلب أحمر على العشب \u202e\u2067"
LONG = "supercalifragilistic" * 120
PROMPTS = [SCRIPT, RTL, LONG, 'a "quoted" & <b>bold</b> fox']
ALARM = "the held-out score shapes fell from 0.700 to 0.400 <script>alert(3)</script>"
SETTINGS = {
    "recipe": {"name": "branch_grpo", "steps": 8, "at": [0, 2]},
    "model": {"pipeline": "flowrl/demo/shapes-sd3", "lora": None},
    "prompts": {"train": "configs/prompts/shapes_train.jsonl"},
    "rewards": [{"name": "shapes"}],
    "train": {"iterations": 4, "lr": 0.0001},
}


def waves(seed: int, size: int, frames: int = 0) -> torch.Tensor:
    """A smooth image or video with a little noise, as hard to compress as a photograph."""
    random = torch.Generator().manual_seed(seed)
    shape = (3, size, size) if not frames else (frames, 3, size, size)
    line = torch.linspace(0, 6 + seed % 5, size)
    base = 0.5 + 0.25 * (line.sin()[:, None] + (line * 1.7).cos()[None])
    return (base + 0.06 * torch.randn(shape, generator=random)).clamp(0, 1)


def sample(place: int, score: float | None, kind: str, size: int = 32) -> SampleRecord:
    prompt = PROMPTS[place % len(PROMPTS)]
    scores = {"shapes": score, "brightness": 0.5}
    if kind == "text":
        return SampleRecord(place, prompt, scores, f"answer {place} {SCRIPT}")
    small = small_copy(waves(place, size, 5 if kind == "video" else 0), 224)
    return SampleRecord(place, prompt, scores, small.url, small.width, small.height, small.frames)


def evaluation(
    iteration: int, scores: list[float | None], kind: str = "image", size: int = 32, shown: int = 4
) -> EvaluationRecord:
    """`scores` of 4 prompts, in equal numbers; the first `shown` of the samples are shown."""
    same = [sample(i, scores[i % len(scores)], kind, size) for i in range(shown)]
    digests = [f"{i:016x}" for i in range(len(PROMPTS))]
    every = {"shapes": scores, "brightness": [0.5] * len(scores)}
    return EvaluationRecord(
        iteration, kind, "shapes", 7, PROMPTS, digests, every, same, same[:2], same[-2:]
    )


def tree(iteration: int, kind: str = "image") -> TreeRecord:
    """Two roots' worth of splits: nodes 1, 2, 2, 4 with values by hand."""
    totals = [1.0, 0.5, 0.25, None]
    levels = [
        LevelRecord(1.0, True, True, [0, 0, 0, 0], [0.5833], [0.0]),
        LevelRecord(0.75, True, True, [0, 0, 1, 1], [0.75, 0.25], [1.5, -1.25]),
        LevelRecord(0.5, False, False, [0, 0, 1, 1], [0.75, 0.25], [None, None]),
        LevelRecord(0.25, True, True, [0, 1, 2, 3], [1.0, 0.5, 0.25, None], [2.0, 0.5, -1.0, None]),
    ]
    leaves = [sample(i, score, kind) for i, score in enumerate(totals)]
    return TreeRecord(iteration, kind, SCRIPT, 1, 1, levels, leaves, totals)


def group(iteration: int) -> TreeRecord:
    """Four samples that share no state."""
    values, advantages = [1.0] * 4, [0.5, None, -1.0, 2.0]
    alone = [
        replace(each, node=[0, 1, 2, 3], values=values, advantages=advantages)
        for each in tree(iteration).levels
    ]
    return replace(tree(iteration), roots=4, levels=alone)


def metrics(iteration: int) -> dict[str, float]:
    wave = 0.5 + 0.1 * (iteration % 7) / 7
    line = {
        "reward": wave, "reward_std": 0.2, "reward/shapes": wave, "reward_std/shapes": 0.2,
        "image/brightness": 0.5, "image/diversity": 0.3, "kl": 1e-4 * iteration, "ratio": 1.0,
        "clipped_low": 0.01, "clipped_high": 0.02, "grad_norm": 0.4, "loss": -1e-3, "lr": 1e-4,
        "seconds": 3.0, "seconds/sample": 1.0, "seconds/score": 0.5, "seconds/update": 1.5,
        "alarms": float(iteration == 4), "calls/judge/failed": 0.0,
    }  # fmt: skip
    return line | {f"image/{name}": 0.2 + wave / 5 for name in ("saturation", "edges", "entropy")}


def held_out(scores: list[float | None]) -> dict[str, float]:
    known = [score for score in scores if score is not None]
    return {
        "held_out/shapes": sum(known) / len(known), "held_out_std/shapes": 0.4,
        "held_out_gain_error/shapes": 0.05, "held_out/image/diversity": 0.3,
    }  # fmt: skip


def write_run(folder: Path, kind: str = "image", end: float = 0.75) -> Path:
    """A run of four iterations with evaluations at 0, 2 and 4, and an alarm at the last one."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
    starts = [0.0, 0.5, 1.0, 0.5] * 2
    now = {0: starts, 2: [0.5] * 8, 4: [end, end, None, end] * 2}
    lines = []
    for iteration in range(5):
        line = {} if iteration == 0 else metrics(iteration)
        lines.append({"iteration": iteration, **line, **held_out(now.get(iteration, starts))})
        if iteration in now:
            write_record(folder, evaluation(iteration, now[iteration], kind))
        if iteration in (1, 2, 4):
            write_record(folder, tree(iteration, kind))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    append_record(folder, LaunchRecord(0, {"torch": "2.9", "model": SCRIPT}, "a draw: 1 plan <b>"))
    append_record(folder, AlarmRecord(4, ALARM))
    return folder


def write_long_run(folder: Path, iterations: int = 200, every: int = 10) -> Path:
    """A run of many iterations with images of 512 pixels, as they come from a large model."""
    folder.mkdir(parents=True)
    settings = SETTINGS | {"train": {"iterations": iterations}, "evaluate": {"every": every}}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    lines = []
    for iteration in range(iterations + 1):
        line = {} if iteration == 0 else metrics(iteration)
        if iteration % every == 0:
            scores: list[float | None] = [0.5 + iteration / 1000] * 512
            write_record(folder, evaluation(iteration, scores, size=512, shown=12))
            write_record(folder, tree(iteration))
            line |= held_out(scores)
        lines.append({"iteration": iteration, **line})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
