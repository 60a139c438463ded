"""The demo's world: images of coloured shapes, their prompts and the three splits of prompts.

`rewards.catalogue.shapes`, which checks images, also parses a prompt into `WantedShapes`. This
module draws a scene for it, with random places and sizes.
"""

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.json_text import json_text
from rewards.catalogue.shapes import (
    BACKGROUND,
    COLOURS,
    RELATIONS,
    SHAPES,
    WantedShapes,
    parse_shapes,
)

SIZE = 32  # pixels a side
MARGIN = 1.0  # least distance, in pixels, of an object from the image's edge
GAP = 1.2  # least distance between the boxes of two objects
PROMPT_KINDS = ("single", "two", "count")
KIND_SHARES = (0.2, 0.6, 0.2)  # of the kinds among the images of pre-training

Split = Literal["train", "held_out", "test"]


@dataclass(frozen=True)
class PlacedObject:
    """An object to draw; centre and radius in pixels of a SIZE x SIZE image."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float


def all_prompts() -> list[str]:
    """All prompts of the world: 18 single, 36 with a number, 1,080 with two objects."""
    things = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    pairs = [(a, b) for a, b in itertools.product(things, things) if a.split()[0] != b.split()[0]]
    return [
        *(f"a {thing}" for thing in things),
        *(f"{number} {thing}s" for number in ("two", "three") for thing in things),
        *(f"a {a} {relation} a {b}" for a, b in pairs for relation in RELATIONS),
    ]


def split(prompt: str) -> Split:
    """Split of a prompt, by a hash of its text: an eighth held out, an eighth for the test.

    Neither pre-training nor RL sees a held-out or a test prompt.
    """
    match _number(prompt) % 8:
        case 0:
            return "held_out"
        case 1:
            return "test"
    return "train"


def _number(prompt: str) -> int:
    return int.from_bytes(hashlib.sha256(f"prompt {prompt}".encode()).digest(), "little")


def prompts_of(name: Split) -> list[str]:
    return [prompt for prompt in all_prompts() if split(prompt) == name]


def write_prompts(folder: Path) -> None:
    """Write rows {"prompt": ...} of each split, with kinds mixed."""
    for name in get_args(Split):
        prompts = sorted(prompts_of(name), key=_number)
        lines = [json_text({"prompt": prompt}) for prompt in prompts]
        (folder / f"shapes_{name}.jsonl").write_text("\n".join(lines) + "\n")


def wanted_shapes(prompt: str) -> WantedShapes:
    wanted = parse_shapes(prompt)
    if wanted is None:
        raise ValueError(f"{prompt!r} is not a prompt of this world; see all_prompts()")
    return wanted


def arrange(wanted: WantedShapes, rng: random.Random) -> list[PlacedObject]:
    """Place the wanted objects at random without overlaps and inside the image."""
    if wanted.relation is not None:
        return _arrange_pair(wanted, rng)
    low, high = (5.0, 8.0) if len(wanted.things) == 1 else (4.4, 5.6)
    placed: list[PlacedObject] = []
    tries = 0
    while len(placed) < len(wanted.things):
        radius = rng.uniform(low, high)
        x, y = (rng.uniform(radius + MARGIN, SIZE - radius - MARGIN) for _ in range(2))
        if all(max(abs(x - t.x), abs(y - t.y)) > radius + t.radius + GAP for t in placed):
            placed.append(PlacedObject(*wanted.things[len(placed)], x, y, radius))
        tries += 1
        if tries % 60 == 0:  # the first objects may leave no room for the last
            placed.clear()
    return placed


def _arrange_pair(wanted: WantedShapes, rng: random.Random) -> list[PlacedObject]:
    """Two objects, one after the other along the relation's axis, slightly shifted across it."""
    radii = [rng.uniform(4.6, 6.2) for _ in range(2)]
    distance = sum(radii) + rng.uniform(1.5, 4.0)
    first = rng.uniform(radii[0] + GAP, max(radii[0] + GAP, SIZE - GAP - radii[1] - distance))
    along = [first, first + distance]
    across = [rng.uniform(radii[0] + MARGIN, SIZE - radii[0] - MARGIN)]
    shifted = across[0] + rng.uniform(-5.0, 5.0)
    across.append(min(max(shifted, radii[1] + MARGIN), SIZE - radii[1] - MARGIN))
    if wanted.relation in ("right of", "below"):
        along = [SIZE - place for place in along]
    sideways = wanted.relation in ("left of", "right of")
    places = zip(along, across, strict=True) if sideways else zip(across, along, strict=True)
    return [
        PlacedObject(*thing, x, y, radius)
        for thing, (x, y), radius in zip(wanted.things, places, radii, strict=True)
    ]


def render(
    scenes: Sequence[Sequence[PlacedObject]], size: int = SIZE
) -> Float[Tensor, "n 3 size size"]:
    """Render images in 0..1 with edges smooth over one pixel; later objects cover earlier ones.

    `size` other than 32 draws the same scenes larger or smaller.
    """
    n, most = len(scenes), max(map(len, scenes), default=0)
    images = (torch.tensor(BACKGROUND) / 255).view(1, 3, 1, 1).repeat(n, 1, size, size)
    centres = (torch.arange(size) + 0.5) * (SIZE / size)
    y, x = torch.meshgrid(centres, centres, indexing="ij")
    for place in range(most):
        rows = [row for row, scene in enumerate(scenes) if len(scene) > place]
        things = [scenes[row][place] for row in rows]
        cx, cy, radius = torch.tensor([(t.x, t.y, t.radius) for t in things]).T[:, :, None, None]
        shape = torch.tensor([SHAPES.index(t.shape) for t in things])[:, None, None]
        colour = torch.tensor([COLOURS[t.colour] for t in things])[:, :, None, None] / 255
        outside = _distance(shape, x - cx, y - cy, radius) * (size / SIZE)
        cover = (0.5 - outside).clamp(0, 1)[:, None]
        images[rows] = images[rows] * (1 - cover) + colour * cover
    return images


def _distance(shape: Tensor, dx: Tensor, dy: Tensor, radius: Tensor) -> Tensor:
    """Signed distance [m h w] in pixels from a shape's edge, below 0 inside."""
    circle = (dx.square() + dy.square()).sqrt() - radius
    square = torch.maximum(dx.abs(), dy.abs()) - 0.9 * radius
    # isosceles, apex up: half its base is `half`, its height 1.7 half, centred in its box
    half = 1.05 * radius
    rise = 0.85 * half
    slant = (dx.abs() * 1.7 - (dy + rise)) / (1.7**2 + 1) ** 0.5
    triangle = torch.maximum(slant, dy - rise)
    return torch.where(shape == 0, circle, torch.where(shape == 1, square, triangle))


def draw_prompts(n: int, rng: random.Random, name: Split = "train") -> list[str]:
    """n prompts of a split, with kinds in the proportions KIND_SHARES."""
    by_kind: dict[str, list[str]] = {kind: [] for kind in PROMPT_KINDS}
    for prompt in prompts_of(name):
        by_kind[wanted_shapes(prompt).kind].append(prompt)
    return [rng.choice(by_kind[kind]) for kind in rng.choices(PROMPT_KINDS, KIND_SHARES, k=n)]


def render_images(prompts: Sequence[str], rng: random.Random) -> Float[Tensor, "n 3 32 32"]:
    """One random image in 0..1 per prompt."""
    return render([arrange(wanted_shapes(prompt), rng) for prompt in prompts])


if __name__ == "__main__":  # python -m flowrl.demo.world
    write_prompts(Path("configs/prompts"))
