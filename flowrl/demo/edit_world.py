"""The editing demo's world: scenes of coloured shapes, instructions and the edited scenes.

It uses the scenes and splits of `flowrl.demo.world`. `rewards.catalogue.edit_shapes`, which checks
edits, also parses an instruction into a `ShapeEdit`. Objects of a scene have different colours, so
an instruction names one of them.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from flowrl.demo.given_shapes import write_lines, write_sheet
from flowrl.demo.world import GAP, MARGIN, SIZE, PlacedObject, Split, render, split
from rewards.catalogue.edit_shapes import DIRECTIONS, EditKind, ShapeEdit, grade_edit, parse_edit
from rewards.catalogue.shapes import COLOURS, SHAPES, detect

SOURCES = {"train": 4, "held_out": 8, "test": 8}  # source images of each instruction
EDIT_SHARES: dict[EditKind, float] = {"recolour": 0.35, "move": 0.35, "add": 0.15, "remove": 0.15}
RADII = (4.4, 5.8)
MOVED_PIXELS = (6.5, 11.0)  # pixels of a move; the reward asks for less
ARRANGEMENT_TRIES = 40  # arrangements of one set of objects, before others are drawn


@dataclass(frozen=True)
class EditPair:
    """A scene before and after an instruction, which changes no other object.

    `other` is another instruction of the train split for the same source.
    """

    instruction: str
    source: tuple[PlacedObject, ...]
    target: tuple[PlacedObject, ...]
    other: str


def all_instructions() -> list[str]:
    """All instructions: 90 recolour, 72 move, 18 add and 18 remove objects."""
    return [text for kind in get_args(EditKind) for text in _instructions(kind)]


def _instructions(kind: EditKind) -> list[str]:
    things = [f"{colour} {shape}" for colour, shape in itertools.product(COLOURS, SHAPES)]
    return [text for thing in things for text in _about(kind, thing)]


def _about(kind: EditKind, thing: str) -> list[str]:
    """The instructions of a kind about one object, such as "red circle"."""
    match kind:
        case "recolour":
            return [f"make the {thing} {c}" for c in COLOURS if c != thing.split()[0]]
        case "move":
            return [f"move the {thing} {direction}" for direction in DIRECTIONS]
        case "add":
            return [f"add a {thing}"]
        case "remove":
            return [f"remove the {thing}"]


def instructions_of(name: Split) -> list[str]:
    return [text for text in all_instructions() if split(text) == name]


def wanted_edit(instruction: str) -> ShapeEdit:
    edit = parse_edit(instruction)
    if edit is None:
        raise ValueError(f"{instruction!r} is not an instruction of this world")
    return edit


def draw_pair(instruction: str, rng: random.Random) -> EditPair:
    """Draw a source with one or two objects besides the named one, and its edit."""
    edit = wanted_edit(instruction)
    while True:
        used = {edit.colour, edit.to}
        free = [colour for colour in COLOURS if colour not in used]
        count = rng.choice((1, 2)) if edit.kind in ("add", "remove") else 1
        things = [(colour, rng.choice(SHAPES)) for colour in rng.sample(free, count)]
        for _ in range(ARRANGEMENT_TRIES):
            subject, *rest = (
                _placed(*thing, rng) for thing in ((edit.colour, edit.shape), *things)
            )
            after = edited(subject, edit, rng)
            source = tuple(rest) if edit.kind == "add" else (subject, *rest)
            target = tuple(rest) if after is None else (*rest, after)
            if stands(source) and stands(target):
                source = tuple(rng.sample(source, len(source)))
                return EditPair(instruction, source, target, _other(source, instruction, rng))


def _placed(colour: str, shape: str, rng: random.Random) -> PlacedObject:
    radius = rng.uniform(*RADII)
    x, y = (rng.uniform(radius + MARGIN, SIZE - radius - MARGIN) for _ in range(2))
    return PlacedObject(colour, shape, x, y, radius)


def edited(subject: PlacedObject, edit: ShapeEdit, rng: random.Random) -> PlacedObject | None:
    """The named object after the edit; None if it is removed."""
    match edit.kind:
        case "remove":
            return None
        case "add":
            return subject
        case "recolour":
            return replace(subject, colour=str(edit.to))
        case "move":
            (dx, dy), far = DIRECTIONS[str(edit.to)], rng.uniform(*MOVED_PIXELS)
            return replace(subject, x=subject.x + far * dx, y=subject.y + far * dy)


def stands(scene: Sequence[PlacedObject]) -> bool:
    """Whether objects neither overlap nor leave the image."""
    inside = all(
        t.radius + MARGIN <= place <= SIZE - t.radius - MARGIN
        for t in scene
        for place in (t.x, t.y)
    )
    return inside and all(
        max(abs(a.x - b.x), abs(a.y - b.y)) > a.radius + b.radius + GAP
        for a, b in itertools.combinations(scene, 2)
    )


def _other(scene: Sequence[PlacedObject], instruction: str, rng: random.Random) -> str:
    """Another instruction that this scene allows, of the train split."""
    while True:
        kind = rng.choices(list(EDIT_SHARES), list(EDIT_SHARES.values()))[0]
        if kind == "add":
            shown = {thing.colour for thing in scene}
            colour = rng.choice([colour for colour in COLOURS if colour not in shown])
            text = f"add a {colour} {rng.choice(SHAPES)}"
        else:
            thing = rng.choice(list(scene))
            text = rng.choice(_about(kind, f"{thing.colour} {thing.shape}"))
        taken = wanted_edit(text).to in {thing.colour for thing in scene}
        if text != instruction and split(text) == "train" and not taken:
            return text


def draw_pairs(n: int, rng: random.Random, name: Split = "train") -> Iterator[EditPair]:
    """n pairs of a split, with kinds in the proportions EDIT_SHARES."""
    instructions = set(instructions_of(name))
    by_kind = {kind: [t for t in _instructions(kind) if t in instructions] for kind in EDIT_SHARES}
    for kind in rng.choices(list(EDIT_SHARES), list(EDIT_SHARES.values()), k=n):
        yield draw_pair(rng.choice(by_kind[kind]), rng)


def write_edits(folder: Path, seed: int = 0) -> None:
    """Write rows {"prompt", "image"} of each split, with kinds mixed, and one sheet of all source
    images."""
    names = get_args(Split)
    pairs = {name: _split_pairs(name, random.Random(f"edits {seed} {name}")) for name in names}
    sources = [pair.source for name in names for pair in pairs[name]]
    pieces = iter(write_sheet(render(sources), folder / "edits.png"))
    for name in names:
        rows = [{"prompt": pair.instruction, "image": next(pieces)} for pair in pairs[name]]
        write_lines(folder / f"edits_{name}.jsonl", rows)


def _split_pairs(name: Split, rng: random.Random) -> list[EditPair]:
    texts = [text for text in instructions_of(name) for _ in range(SOURCES[name])]
    pairs = [draw_pair(text, rng) for text in texts]
    while unclear := [i for i, pair in enumerate(pairs) if not clear(pair)]:
        for i in unclear:
            pairs[i] = draw_pair(texts[i], rng)
    rng.shuffle(pairs)
    return pairs


def clear(pair: EditPair) -> bool:
    """Whether the reward's detector accepts the drawn edit."""
    source, target = detect(render([pair.source, pair.target]))
    return grade_edit(source, target, wanted_edit(pair.instruction)) == 1


if __name__ == "__main__":  # python -m flowrl.demo.edit_world
    write_edits(Path("configs/prompts"))
