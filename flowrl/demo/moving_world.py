"""The video demo's world: short videos of moving shapes, their prompts and the splits of prompts.

It uses the frames and splits of `flowrl.demo.world`. `rewards.catalogue.moving_shapes`, which
checks videos, also reads the prompts; this module draws the videos with random places, sizes and
speeds.
"""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from jaxtyping import Float
from torch import Tensor

from flowrl.demo.world import MARGIN, SIZE, PlacedObject, Split, render, split
from flowrl.json_text import json_text
from rewards.catalogue.moving_shapes import MOTIONS, Actor, parse_motion
from rewards.catalogue.shapes import COLOURS, SHAPES

VIDEO_FRAMES = 5
ACTOR_SHARES = {1: 0.3, 2: 0.7}  # by number of actors, among the videos of pre-training
TRAVEL = (9.0, 14.0)  # pixels from the first frame to the last
RADIUS = {1: (5.2, 7.5), 2: (4.8, 5.8)}
OPPOSITES = (
    ("moving right", "moving left"),
    ("moving left", "moving right"),
    ("moving up", "moving down"),
    ("moving down", "moving up"),
)


def all_moving_prompts() -> list[str]:
    """All prompts of the world: 90 with one shape, 1,080 with two shapes that pass each other."""
    things = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
    pairs = [(a, b) for a, b in itertools.product(things, things) if a.split()[1] != b.split()[1]]
    return [
        *(f"{thing} {motion}" for thing in things for motion in MOTIONS),
        *(f"{a} {one} and {b} {other}" for a, b in pairs for one, other in OPPOSITES),
    ]


def moving_prompts_of(name: Split) -> list[str]:
    """All prompts of a split, with kinds mixed."""
    prompts = [prompt for prompt in all_moving_prompts() if split(prompt) == name]
    random.Random(0).shuffle(prompts)
    return prompts


def write_moving_prompts(folder: Path) -> None:
    """Write the rows {"prompt": ...} of each split."""
    for name in get_args(Split):
        lines = [json_text({"prompt": prompt}) for prompt in moving_prompts_of(name)]
        (folder / f"moving_{name}.jsonl").write_text("\n".join(lines) + "\n")


def wanted_actors(prompt: str) -> tuple[Actor, ...]:
    actors = parse_motion(prompt)
    if actors is None:
        raise ValueError(f"{prompt!r} is not a prompt of this world; see all_prompts()")
    return actors


def play(actors: Sequence[Actor], rng: random.Random) -> list[list[PlacedObject]]:
    """Objects in each frame. Two actors pass each other in separate lanes."""
    lanes = rng.sample(range(len(actors)), len(actors))
    paths = [
        _path(actor, lane, len(actors), rng) for actor, lane in zip(actors, lanes, strict=True)
    ]
    return [list(frame) for frame in zip(*paths, strict=True)]


def _path(actor: Actor, lane: int, lanes: int, rng: random.Random) -> list[PlacedObject]:
    """Positions of an actor: even steps along its motion, at a random offset within its lane."""
    radius, travel = rng.uniform(*RADIUS[lanes]), rng.uniform(*TRAVEL)
    dx, dy = MOTIONS[actor.motion]
    travel = travel if dx or dy else 0.0
    least = radius + MARGIN
    start = rng.uniform(least, SIZE - least - travel)
    width = SIZE / lanes
    across = lane * width + rng.uniform(least, width - least)
    path = []
    for frame in range(VIDEO_FRAMES):
        along = start + travel * frame / (VIDEO_FRAMES - 1)
        along = SIZE - along if dx + dy < 0 else along
        x, y = (across, along) if dy else (along, across)
        path.append(PlacedObject(actor.colour, actor.shape, x, y, radius))
    return path


def draw_moving_prompts(n: int, rng: random.Random, name: Split = "train") -> list[str]:
    """n prompts of a split, with one and two actors in the proportions ACTOR_SHARES."""
    by_number: dict[int, list[str]] = {number: [] for number in ACTOR_SHARES}
    for prompt in moving_prompts_of(name):
        by_number[len(wanted_actors(prompt))].append(prompt)
    numbers = rng.choices(list(ACTOR_SHARES), list(ACTOR_SHARES.values()), k=n)
    return [rng.choice(by_number[number]) for number in numbers]


def render_videos(prompts: Sequence[str], rng: random.Random) -> Float[Tensor, "n 5 3 32 32"]:
    """One random video in 0..1 per prompt."""
    videos = [play(wanted_actors(prompt), rng) for prompt in prompts]
    frames = render([frame for video in videos for frame in video])
    return frames.unflatten(0, (len(videos), VIDEO_FRAMES))


if __name__ == "__main__":  # python -m flowrl.demo.moving_world
    write_moving_prompts(Path("configs/prompts"))
