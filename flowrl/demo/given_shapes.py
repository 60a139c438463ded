"""Given samples of the demo's world: preference pairs, and images of the world itself.

    python -m flowrl.demo.given_shapes FOLDER [--prompts 600] [--samples 6]
        [--pairs 512] [--scenes 4000] [--seed 0]

pairs.jsonl   prompt, chosen, rejected: samples of the demo's own pipeline, one right and the other
              wrong by the rules of the reward `shapes` (strict)
images.jsonl  prompt, image: scenes of the world, drawn without a network, each the clearest of 16
sheet.png     all samples of pairs, and scenes.png all scenes; a row names a part of one

Only training prompts are sampled. On the same machine, equal arguments produce equal files.
"""

import argparse
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from flowrl.demo.world import (
    SIZE,
    PlacedObject,
    arrange,
    draw_prompts,
    render,
    wanted_shapes,
)
from flowrl.json_text import json_text
from flowrl.paths import find
from rewards import Samples, load
from rewards.combine import scored
from rewards.perception.media import to_pil, to_tensor
from samplers.noise import normal

STEPS = 8
ROWS_PER_CALL = 96
SHEET_COLUMNS = 32
ARRANGEMENTS = 16
DEFAULT_COUNTS = {"prompts": 600, "samples": 6, "pairs": 512, "scenes": 4000, "seed": 0}


def sampled_images(prompts: Sequence[str], seed: int) -> Float[Tensor, "n 3 h w"]:
    """One sample of the demo's pipeline per prompt, with 8 bits per channel."""
    pipe: Any = DiffusionPipeline.from_pretrained(str(find("flowrl/demo/shapes-sd3")))
    pipe.set_progress_bar_config(disable=True)
    shape = (pipe.transformer.config.in_channels, SIZE // 4, SIZE // 4)
    images: list[Tensor] = []
    for start in range(0, len(prompts), ROWS_PER_CALL):
        part = list(prompts[start : start + ROWS_PER_CALL])
        keys = [(seed, "given", start + i) for i in range(len(part))]
        output = pipe(
            part, latents=normal(keys, shape), num_inference_steps=STEPS, guidance_scale=1.0,
            height=SIZE, width=SIZE, max_sequence_length=1,
        )  # fmt: skip
        images += [to_tensor(image) for image in output.images]
    return torch.stack(images)


def strict(images: Float[Tensor, "n 3 h w"], prompts: Sequence[str]) -> Tensor:
    """Whether each image shows what its prompt describes [n]."""
    reward = load("shapes", kind="strict")
    return (
        scored("shapes", reward, Samples(images, list(prompts), torch.arange(len(prompts)))) > 0.5
    )


def pairs_of(right: Tensor, samples: int) -> list[tuple[int, int]]:
    """Pairs (right, wrong) of samples of the same prompt; each sample is used at most once."""
    pairs: list[tuple[int, int]] = []
    for first in range(0, len(right), samples):
        group = range(first, first + samples)
        good, bad = ([i for i in group if bool(right[i]) == wanted] for wanted in (True, False))
        pairs += list(zip(good, bad, strict=False))
    return pairs


def clear_scenes(prompts: Sequence[str], rng: random.Random) -> list[list[PlacedObject]]:
    """Draw ARRANGEMENTS random scenes per prompt and return the one with the largest and most
    separated objects. Fine-tuning on few good images follows arXiv:2309.15807."""
    return [
        max((arrange(wanted_shapes(p), rng) for _ in range(ARRANGEMENTS)), key=clearness)
        for p in prompts
    ]


def clearness(scene: Sequence[PlacedObject]) -> float:
    """Smallest radius and half of the smallest gap between objects, in pixels."""
    gaps = [
        max(abs(a.x - b.x), abs(a.y - b.y)) - a.radius - b.radius
        for a, b in itertools.combinations(scene, 2)
    ]
    return min(shape.radius for shape in scene) + 0.5 * min(gaps, default=0.0)


def write_sheet(images: Float[Tensor, "n 3 h w"], path: Path) -> list[str]:
    """Write the images on one sheet; return the name of each part."""
    rows = -(-len(images) // SHEET_COLUMNS)
    sheet = np.zeros((rows * SIZE, SHEET_COLUMNS * SIZE, 3), np.uint8)
    names: list[str] = []
    for i, image in enumerate(images):
        y, x = (place * SIZE for place in divmod(i, SHEET_COLUMNS))
        sheet[y : y + SIZE, x : x + SIZE] = np.asarray(to_pil(image))
        names.append(f"{path.name}#xywh={x},{y},{SIZE},{SIZE}")
    Image.fromarray(sheet).save(path, optimize=True)
    return names


def write_lines(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json_text(row) + "\n" for row in rows))


def write_pairs(folder: Path, prompts: int, samples: int, most: int, seed: int) -> int:
    """Write pairs.jsonl and sheet.png; return the number of pairs."""
    rng = random.Random(f"given {seed}")
    asked = [prompt for prompt in draw_prompts(prompts, rng) for _ in range(samples)]
    images = sampled_images(asked, seed)
    pairs = pairs_of(strict(images, asked), samples)[:most]
    names = write_sheet(images[[i for pair in pairs for i in pair]], folder / "sheet.png")
    sides = zip(pairs, names[::2], names[1::2], strict=True)
    rows = [
        {"prompt": asked[a], "chosen": best, "rejected": worst} for (a, _), best, worst in sides
    ]
    write_lines(folder / "pairs.jsonl", rows)
    return len(rows)


def write_scenes(folder: Path, count: int, seed: int) -> int:
    """Write images.jsonl and scenes.png; return the number of scenes."""
    rng = random.Random(f"given {seed} scenes")
    prompts = draw_prompts(count, rng)
    names = write_sheet(render(clear_scenes(prompts, rng)), folder / "scenes.png")
    rows = zip(prompts, names, strict=True)
    write_lines(folder / "images.jsonl", [{"prompt": p, "image": name} for p, name in rows])
    return count


if __name__ == "__main__":
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    words.add_argument("folder", type=Path)
    for name, number in DEFAULT_COUNTS.items():
        words.add_argument(f"--{name}", type=int, default=number)
    given = words.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    pairs = write_pairs(given.folder, given.prompts, given.samples, given.pairs, given.seed)
    scenes = write_scenes(given.folder, given.scenes, given.seed)
    print(f"{given.folder}: pairs.jsonl with {pairs} pairs, images.jsonl with {scenes} scenes")
