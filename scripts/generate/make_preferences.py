"""A preference set with known truth, sampled from the demo's own pipeline.

    python scripts/generate/make_preferences.py [--out configs/preferences] [--noise 0.1] [--seed 0]

Every held-out prompt of the demo's world is sampled with few and with many denoising steps, so that
pairs have good and bad images. The truth is the graded shapes checker. Exactly the share `noise` of
the pairs that it distinguishes gets the wrong label, so `shapes` has an accuracy of exactly
1 - noise on them, and a rank correlation of 1. Pairs that it finds equal are ties. The seed draws
the sides, so that neither is better.

pictures.png   all images, 32 x 32 each, on one sheet
pairs.jsonl    prompt, a, b, label, category: the plain layout
ranks.json     prompt, generations, ranking: the layout of ImageReward's test set
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from flowrl.demo.world import SIZE, prompts_of, wanted_shapes
from rewards import Samples, load
from rewards.perception.media import to_pil, to_tensor
from samplers.noise import normal

STEPS = (2, 3, 4, 10)  # denoising steps of a prompt's images
COLUMNS = 24  # of the sheet
PAIRS = 3  # per prompt at most, with a winner by the truth
EQUAL = 0.2  # share of prompts that may also have a tie


def paint(prompts: Sequence[str], seed: int) -> Float[Tensor, "n 3 h w"]:
    """Sample one image per prompt and number of steps, prompts outermost; 8 bits deep."""
    pipe = DiffusionPipeline.from_pretrained("flowrl/demo/shapes-sd3")
    pipe.set_progress_bar_config(disable=True)
    shape = (pipe.transformer.config.in_channels, SIZE // 4, SIZE // 4)
    columns = []
    for steps in STEPS:
        noise = normal([(seed, "preferences", p, steps) for p in prompts], shape)
        with torch.no_grad():
            images = pipe(
                list(prompts),
                latents=noise,
                num_inference_steps=steps,
                guidance_scale=1.0,
                height=SIZE,
                width=SIZE,
                max_sequence_length=1,
            ).images
        columns.append(torch.stack([to_tensor(image) for image in images]))
    return torch.stack(columns, 1).flatten(0, 1)


def truth(images: Tensor, prompts: Sequence[str]) -> np.ndarray:
    """[prompts steps] graded scores of the checker."""
    each = [prompt for prompt in prompts for _ in STEPS]
    samples = Samples(images, each, torch.arange(len(prompts)).repeat_interleave(len(STEPS)))
    return load("shapes", kind="graded")(samples).double().numpy().reshape(-1, len(STEPS))


def sheet(images: Tensor) -> Image.Image:
    rows = -(-len(images) // COLUMNS)
    page = Image.new("RGB", (COLUMNS * SIZE, rows * SIZE))
    for i, image in enumerate(images):
        page.paste(to_pil(image), (i % COLUMNS * SIZE, i // COLUMNS * SIZE))
    return page


def place(number: int) -> str:
    x, y = number % COLUMNS * SIZE, number // COLUMNS * SIZE
    return f"pictures.png#xywh={x},{y},{SIZE},{SIZE}"


def pairs(
    prompts: Sequence[str], scores: np.ndarray, noise: float, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Rows of pairs.jsonl, the wrong labels among them."""
    rows = []
    for p, prompt in enumerate(prompts):
        order = [
            tuple(rng.permutation(pair)) for pair in itertools.combinations(range(len(STEPS)), 2)
        ]
        rng.shuffle(order)
        unequal = [(a, b) for a, b in order if scores[p, a] != scores[p, b]][:PAIRS]
        equal = [(a, b) for a, b in order if scores[p, a] == scores[p, b]]
        for a, b in [*unequal, *(equal[:1] if rng.random() < EQUAL else [])]:
            better = np.sign(scores[p, a] - scores[p, b])
            rows.append(
                {
                    "prompt": prompt,
                    "a": place(p * len(STEPS) + a),
                    "b": place(p * len(STEPS) + b),
                    "label": float((1 + better) / 2),
                    "category": wanted_shapes(prompt).kind,
                }
            )
    named = [row for row in rows if row["label"] != 0.5]
    wrong = rng.permutation(len(named))[: round(noise * len(named))]
    for i in wrong:
        named[i]["label"] = 1 - named[i]["label"]
    return rows


def ranks(prompts: Sequence[str], scores: np.ndarray) -> list[dict[str, Any]]:
    """Rows of ranks.json: 1 is the best, equal scores share a rank."""
    return [
        {
            "id": f"{p:03d}",
            "prompt": prompt,
            "generations": [place(p * len(STEPS) + i) for i in range(len(STEPS))],
            "ranking": [1 + int((scores[p] > score).sum()) for score in scores[p]],
        }
        for p, prompt in enumerate(prompts)
        if np.ptp(scores[p]) > 0
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("configs/preferences"))
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    prompts = prompts_of("held_out")
    images = paint(prompts, given.seed)
    scores = truth(images, prompts)
    rng = np.random.default_rng(given.seed)
    rows = pairs(prompts, scores, given.noise, rng)
    given.out.mkdir(parents=True, exist_ok=True)
    sheet(images).save(given.out / "pictures.png", optimize=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (given.out / "pairs.jsonl").write_text(lines)
    (given.out / "ranks.json").write_text(json.dumps(ranks(prompts, scores), indent=0) + "\n")
    ties = sum(row["label"] == 0.5 for row in rows)
    size = sum(path.stat().st_size for path in given.out.iterdir())
    print(f"{len(prompts)} prompts, {len(images)} images, {len(rows)} pairs, {ties} of them ties")
    print(
        f"{given.out}: {size / 1e3:.0f} kB; mean graded score by steps: {scores.mean(0).round(3)}"
    )


if __name__ == "__main__":
    main()
