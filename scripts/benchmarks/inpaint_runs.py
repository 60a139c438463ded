"""Does training help a model to add the missing one of two shapes?

    python scripts/benchmarks/inpaint_runs.py --out runs/inpaint

The pipeline is diffusers' StableDiffusionInpaintPipeline with the weights of the demo of noise
prediction, which have no channels for a mask: the given half of an image is put back after each
step. An image has one shape; the mask is the free half beside it, where the prompt ("... left of
...") wants the other one. One run of NFT per seed of training. Prints a table over seeds; the
folders have pages with the images.
"""

import json
import math
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from diffusers import StableDiffusionInpaintPipeline, StableDiffusionPipeline
from experiment import GAIN_HEAD, Ends, ends, gain_row, with_seeds
from PIL import Image
from torch import Tensor

import flowrl
from flowrl.demo.world import (
    SIZE,
    PlacedObject,
    Split,
    arrange,
    prompts_of,
    render,
    wanted_shapes,
)
from flowrl.paths import PROJECT

ROW = 16  # images of a row of a sheet
LEAST = 12  # pixels of the free side, below which no shape fits
RUN: dict[str, Any] = {
    "recipe": {"name": "nft", "steps": 8, "group": 12, "levels_per_sample": 4},
    "model": {"lora": None, "call": {"strength": 1.0, "height": SIZE, "width": SIZE}},
    "prompts": {"per_iteration": 16},
    "rewards": [{"name": "shapes", "kind": k, "weight": 0.5} for k in ("graded", "strict")],
    "held_out_rewards": [{"name": "shapes", "kind": "strict"}],
    "train": {
        "iterations": 12, "lr": 3e-4, "schedule": {"warmup": 5}, "updates": 2, "alarms": "off",
    },
    "evaluate": {"every": 6, "steps": 10, "samples": 160, "average": 0.9},
    "checkpoint": {"every": 6},
    "track": {"images": 18},
}  # fmt: skip


@dataclass
class Arguments:
    out: Path = Path("runs/inpaint")
    seeds: tuple[int, ...] = (0, 1, 2)


def free_side(away: float, stays: PlacedObject, at: float) -> tuple[int, int]:
    """Pixels (from, to) of the side where the other shape is, in steps of a latent's 4 pixels."""
    reach = stays.radius * 1.05 + 0.5
    if away < at:
        return 0, math.floor((at - reach) / 4) * 4
    return math.ceil((at + reach) / 4) * 4, SIZE


def sheet(folder: Path, name: Split, count: int, seed: int) -> None:
    """Write NAME.jsonl with its images and masks, each of them a part of one file."""
    rng = random.Random(seed)
    prompts = [p for p in prompts_of(name) if wanted_shapes(p).relation]
    rows, images, masks = list[dict[str, str]](), list[Tensor](), list[Tensor]()
    while len(rows) < count:
        prompt = rng.choice(prompts)
        wanted = wanted_shapes(prompt)
        gone, stays = arrange(wanted, rng)
        beside = wanted.relation in ("left of", "right of")
        if rng.random() >= 0.5:
            gone, stays = stays, gone
        away, at = (gone.x, stays.x) if beside else (gone.y, stays.y)
        low, high = free_side(away, stays, at)
        if high - low < LEAST:
            continue
        mask = torch.zeros(SIZE, SIZE)
        mask[(slice(None), slice(low, high)) if beside else slice(low, high)] = 1
        place = f"{SIZE * (len(rows) % ROW)},{SIZE * (len(rows) // ROW)},{SIZE},{SIZE}"
        files = {"image": f"{name}.png", "mask_image": f"{name}_mask.png"}
        rows.append({"prompt": prompt} | {k: f"{f}#xywh={place}" for k, f in files.items()})
        images.append(render([[stays]])[0])
        masks.append(mask.expand(3, SIZE, SIZE))
    save(images, folder / f"{name}.png")
    save(masks, folder / f"{name}_mask.png")
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def save(images: list[Tensor], file: Path) -> None:
    blank = [torch.zeros_like(images[0])] * (-len(images) % ROW)
    lines = torch.stack([*images, *blank]).unflatten(0, (-1, ROW))
    whole = lines.permute(0, 3, 1, 4, 2).reshape(-1, SIZE * ROW, 3)
    Image.fromarray((whole * 255).round().byte().numpy()).save(file)


def prepared(folder: Path) -> None:
    """Write the prompt files, and the demo's weights as a pipeline for inpainting."""
    folder.mkdir(parents=True, exist_ok=True)
    sheet(folder, "train", 384, 0)
    sheet(folder, "held_out", 160, 1)
    if (folder / "model").exists():
        shutil.rmtree(folder / "model")
    made = StableDiffusionPipeline.from_pretrained(PROJECT / "flowrl/demo/shapes-sd15")
    parts = {**made.components, "safety_checker": None}
    StableDiffusionInpaintPipeline(**parts, requires_safety_checker=False).save_pretrained(
        folder / "model"
    )


def trained(seed: int, folder: Path) -> Ends:
    """Held-out accuracy before and after one run."""
    run = flowrl.train(
        str(folder / "model"), prompts=str(folder / "train.jsonl"),
        held_out=str(folder / "held_out.jsonl"), seed=seed, settings=RUN,
        folder=folder / f"seed{seed}",
    )  # fmt: skip
    return ends(run.metrics, "held_out/shapes.strict")


def main(given: Arguments) -> None:
    torch.set_num_threads(1)
    prepared(given.out)
    found = with_seeds(given.seeds, lambda seed: trained(seed, given.out.resolve()))
    print(GAIN_HEAD)
    print(gain_row("strict", found))


if __name__ == "__main__":
    main(tyro.cli(Arguments))
