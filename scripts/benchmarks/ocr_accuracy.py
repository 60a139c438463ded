"""Accuracy of the OCR reward: renders known texts and reports the rate that is read exactly.

    python scripts/benchmarks/ocr_accuracy.py                   # 200 images, 20 s on one core
    python scripts/benchmarks/ocr_accuracy.py --count 60 --side 736

Fonts are Pillow's own and those of --fonts (a folder that is searched for *.ttf).
Texts are one to three words from a short list, so that they have letters, capitals and digits.
"""

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from rewards.catalogue.ocr import reader, score_texts
from rewards.perception.media import to_tensor

_WORDS = (
    "Hello World Grand Opening Sale Coffee House Stay Calm Open Daily Fresh Bread No Parking Exit "
    "Museum Library Platform Danger High Voltage Happy Birthday Station Welcome Home Garden Market "
    "Journey Quiet Zone Express Summer Winter River Bridge 2024 365 Room 101 Route 66 Gate 7"
)
WORDS = _WORDS.split()


@dataclass(frozen=True)
class Condition:
    """`share` of the images; sizes in pixels of the font, rotation in degrees, noise in 0..1."""

    name: str
    share: float
    sizes: tuple[int, ...] = (16, 18, 20, 24, 32, 48, 64)
    rotation: float = 0.0
    noise: float = 0.0


CONDITIONS = (
    Condition("clean, 16 px or more", 0.4),
    Condition("clean, 10 to 14 px", 0.1, sizes=(10, 12, 14)),
    Condition("rotated by up to 10 degrees", 0.25, rotation=10.0),
    Condition("with noise of std up to 0.2", 0.25, noise=0.2),
)


def fonts(folder: Path) -> list[str | None]:
    """Paths of TrueType fonts; None stands for Pillow's own."""
    found = sorted(p for p in folder.rglob("*.ttf") if "Math" not in p.name)
    return [None, *map(str, found)]


def picture(text: str, font: str | None, condition: Condition, rng: random.Random) -> Image.Image:
    """An image of dark text on light ground or the reverse, with a margin."""
    size = rng.choice(condition.sizes)
    type_ = ImageFont.load_default(size) if font is None else ImageFont.truetype(font, size)
    left, top, right, bottom = (math.ceil(v) for v in type_.getbbox(text))
    margin = 24 + size
    page = Image.new("RGB", (right - left + 2 * margin, bottom - top + 2 * margin))
    ground, ink = (rng.randint(200, 255), rng.randint(0, 60))
    if rng.random() < 0.3:
        ground, ink = ink, ground
    page.paste((ground,) * 3, (0, 0, *page.size))
    ImageDraw.Draw(page).text((margin - left, margin - top), text, (ink,) * 3, type_)
    if condition.rotation:
        angle = rng.uniform(-condition.rotation, condition.rotation)
        bicubic = Image.Resampling.BICUBIC
        page = page.rotate(angle, bicubic, expand=True, fillcolor=(ground,) * 3)
    if condition.noise:
        keyed = np.random.default_rng(rng.getrandbits(32))
        std = rng.uniform(0, condition.noise) * 255
        noisy = np.asarray(page) + keyed.normal(0, std, (page.height, page.width, 3))
        page = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    return page


def wrong_letters(text: str, rng: random.Random) -> str:
    """The text with one letter in ten replaced, at least one."""
    letters = [i for i, c in enumerate(text) if not c.isspace()]
    changed = list(text)
    for i in rng.sample(letters, max(1, round(len(letters) / 10))):
        changed[i] = rng.choice([c for c in "abcdefghkmnoprstuwxyz" if c != text[i].lower()])
    return "".join(changed)


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate."""
    z, p = 1.96, right / count
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--side", type=int, default=320, help="the reward's setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fonts", type=Path, default=Path("/usr/share/fonts"))
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    read, kinds = reader(asked.side), fonts(asked.fonts)
    print(f"{len(kinds)} fonts; the shorter side is enlarged to {asked.side} pixels")
    near: list[tuple[float, float]] = []
    for condition in CONDITIONS:
        rng = random.Random(f"{asked.seed}/{condition.name}")
        count = round(asked.count * condition.share)
        exact, graded, began = 0, 0.0, time.perf_counter()
        for i in range(count):
            text = " ".join(rng.sample(WORDS, rng.randint(1, 3)))
            page = picture(text, kinds[i % len(kinds)], condition, rng)
            lines = read(to_tensor(page))
            right = score_texts(lines, [text], "strict")
            exact, graded = exact + int(right), graded + score_texts(lines, [text])
            if not right:
                print(f"  {Path(kinds[i % len(kinds)] or 'Pillow').stem}: {text!r} as {lines}")
            elif condition is CONDITIONS[0] and len(text.replace(" ", "")) >= 8:
                wrong = wrong_letters(text, rng)
                differ = sum(a != b for a, b in zip(text, wrong, strict=True))
                near.append((score_texts(lines, [wrong]), 1 - differ / len(text.replace(" ", ""))))
        low, high = interval(exact, count)
        seconds = (time.perf_counter() - began) / count
        print(
            f"{condition.name}: {exact} of {count} exact, {exact / count:.3f} "
            f"({low:.3f} to {high:.3f}), graded {graded / count:.3f}, {seconds:.2f} s per image"
        )
    got, due = (sum(column) / len(near) for column in zip(*near, strict=True))
    print(f"one letter in ten wrong: {got:.3f} over {len(near)} texts; {due:.3f} by their lengths")


if __name__ == "__main__":
    main()
