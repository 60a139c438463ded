"""A rule-based checker for edits of images of coloured shapes.

An instruction names one change: "make the red circle blue", "move the red circle to the left" (or
"to the right", "up", "down"), "add a green triangle", "remove the red circle". The objects of the
source image and of the result are found by `rewards.catalogue.shapes` and compared. Two parts are
scored:

* the change, in 0..1: the named object has the other colour, where it was; has moved in the named
direction; was added; was removed;
* the rest, in 0..1: every other object keeps its colour, shape, place and size.

*graded* is change * (1/4 + 3/4 rest), times 0.7 for each further object in the result, so the
unchanged source has 0. *strict* is 1 where graded is exactly 1, otherwise 0.

Only objects are compared. Regions smaller than `rewards.catalogue.shapes.LEAST_AREA` do not count:
a removed object may leave a speck, and a small new one costs nothing. A background far from the
usual one counts as an extra object.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.catalogue.shapes import (
    BACKGROUND,
    COLOURS,
    EXTRA,
    SHAPES,
    DetectedShape,
    ShapesKind,
    detect,
)
from rewards.perception.media import each_size, expect
from rewards.perception.references import check_image_column, column_images
from rewards.types import Kind, Reward, Samples, Share, cell

SCORED_KINDS: tuple[Kind, ...] = ("image",)

EditKind = Literal["recolour", "move", "add", "remove"]
DIRECTIONS = {  # x runs to the right, y down
    "to the right": (1, 0),
    "to the left": (-1, 0),
    "up": (0, -1),
    "down": (0, 1),
}
# lengths are shares of the image's side
SAME_PLACE = 0.07  # an object that is kept or recoloured may be this far away
LEAST_MOVE = 0.15
MOST_ASIDE = 0.09  # of a moved object, across its direction
SAME_SIZE = 0.6  # least ratio of the smaller area to the larger one
REST_FLOOR = 0.25  # of a right change where nothing else was kept
SHAPE_SHARE, PLACE_SHARE, SIZE_SHARE = 0.4, 0.4, 0.2  # of an object that is compared

_THING = rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
_RECOLOUR = re.compile(rf"make the {_THING} ({'|'.join(COLOURS)})")
_MOVE = re.compile(rf"move the {_THING} ({'|'.join(DIRECTIONS)})")
_ADD = re.compile(rf"add an? {_THING}")
_REMOVE = re.compile(rf"remove the {_THING}")


@dataclass(frozen=True)
class ShapeEdit:
    """One change to a scene. `to` is the new colour or the direction of a move."""

    kind: EditKind
    colour: str
    shape: str
    to: str | None = None


def parse_edit(instruction: str) -> ShapeEdit | None:
    """Parse an instruction; None for any other text, and for a change to the same colour.

    Capitals, spaces and a full stop at the end do not matter.
    """
    text = " ".join(instruction.lower().split()).rstrip(".")
    patterns = zip(get_args(EditKind), (_RECOLOUR, _MOVE, _ADD, _REMOVE), strict=True)
    for kind, pattern in patterns:
        if match := pattern.fullmatch(text):
            edit = ShapeEdit(kind, *match.groups())
            return None if edit.colour == edit.to else edit
    return None


def grade_edit(
    source: Sequence[DetectedShape], result: Sequence[DetectedShape], edit: ShapeEdit
) -> float | None:
    """Partial credit in 0..1; exactly 1 if the edit was made and nothing else changed.

    None unless the source has the named object exactly once: otherwise the edit is undefined.
    """
    named = [thing for thing in source if (thing.colour, thing.shape) == (edit.colour, edit.shape)]
    if edit.kind != "add" and len(named) != 1:
        return None
    subject = None if edit.kind == "add" else named[0]
    unedited, left = [thing for thing in source if thing is not subject], list(result)
    rest = [_kept(thing, left) for thing in unedited]
    change = _added(edit, left) if subject is None else _changed(edit, subject, left)
    share = sum(rest) / len(rest) if rest else 1.0
    score = 1.0 if share == 1 else REST_FLOOR + (1 - REST_FLOOR) * share
    return change * score * EXTRA ** len(left)


def _kept(thing: DetectedShape, left: list[DetectedShape]) -> float:
    """Credit for an object that must stay; its match is removed from `left`."""
    match = _take(thing, left, thing.colour)
    if match is None:
        return 0.0
    return _likeness(thing, match, _distance(thing, match) <= SAME_PLACE)


def _changed(edit: ShapeEdit, subject: DetectedShape, left: list[DetectedShape]) -> float:
    """Credit for the named change of an object; its match is removed from `left`."""
    if edit.kind == "remove":
        return float(_take(subject, left, subject.colour) is None)
    if edit.kind == "recolour":
        match = _take(subject, left, edit.to)
        if match is None:
            return 0.0
        return _likeness(subject, match, _distance(subject, match) <= SAME_PLACE)
    match = _take(subject, left, subject.colour)
    if match is None or edit.to is None:
        return 0.0
    dx, dy = match.x - subject.x, match.y - subject.y
    towards = DIRECTIONS[edit.to]
    along, aside = dx * towards[0] + dy * towards[1], abs(dx * towards[1] + dy * towards[0])
    moved = min(1.0, max(0.0, (along - SAME_PLACE) / (LEAST_MOVE - SAME_PLACE)))
    return moved * _likeness(subject, match, aside <= MOST_ASIDE)


def _added(edit: ShapeEdit, left: list[DetectedShape]) -> float:
    """Credit for a requested object; its match is removed from `left`."""
    of_colour = [thing for thing in left if thing.colour == edit.colour]
    match = max(of_colour, key=lambda thing: (thing.shape == edit.shape, thing.area), default=None)
    if match is None:
        return 0.0
    left.remove(match)
    return 1.0 if match.shape == edit.shape else 1 - SHAPE_SHARE


def _take(
    thing: DetectedShape, left: list[DetectedShape], colour: str | None
) -> DetectedShape | None:
    """Remove and return the nearest object of a colour from `left`."""
    of_colour = [shape for shape in left if shape.colour == colour]
    nearest = min(of_colour, key=lambda shape: _distance(thing, shape), default=None)
    if nearest is not None:
        left.remove(nearest)
    return nearest


def _likeness(thing: DetectedShape, match: DetectedShape, placed: bool) -> float:
    """Share in 0..1 of shape, place and size that are right; exactly 1 if all are."""
    small, large = sorted((thing.area, match.area))
    facts = match.shape == thing.shape, placed, small >= SAME_SIZE * large
    if all(facts):
        return 1.0
    shares = (SHAPE_SHARE, PLACE_SHARE, SIZE_SHARE)
    return sum((share for share, fact in zip(shares, facts, strict=True) if fact), 0.0)


def _distance(a: DetectedShape, b: DetectedShape) -> float:
    return ((a.x - b.x) ** 2 + (a.y - b.y) ** 2) ** 0.5


def _square(colour: tuple[int, int, int]) -> Float[Tensor, "3 32 32"]:
    image = (torch.tensor(BACKGROUND) / 255).view(3, 1, 1).repeat(1, 32, 32)
    image[:, 9:23, 9:23] = (torch.tensor(colour) / 255).view(3, 1, 1)
    return image


@dataclass(frozen=True)
class EditShapesReward:
    """One score per image; NaN if the instruction or the source cannot be read."""

    kind: ShapesKind = "graded"
    column: str = "image"
    iou: float = 0.80
    aspect: float = 0.75

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "edit_shapes", "image")
        return each_size(samples, self._score)

    def _score(self, samples: Samples) -> Float[Tensor, " n"]:
        sources = self._sources(samples)
        results = detect(samples.media, self.iou, self.aspect)
        shapes_by_source: dict[
            int, list[DetectedShape]
        ] = {}  # samples of a prompt share their source
        scores: list[float] = []
        for source, result, prompt in zip(sources, results, samples.prompts, strict=True):
            if source is not None and id(source) not in shapes_by_source:
                (shapes_by_source[id(source)],) = detect(source[None], self.iou, self.aspect)
            edit = parse_edit(prompt)
            if source is None or edit is None:
                scores.append(float("nan"))
                continue
            score = grade_edit(shapes_by_source[id(source)], result, edit)
            scores.append(float("nan") if score is None else self._number(score))
        return torch.tensor(scores)

    def _sources(self, samples: Samples) -> list[Tensor | None]:
        """The source image [3 h w] of each sample: from its file, or a tensor as it is."""
        sources = [cell(row, self.column) for row in samples.meta]
        if sources and all(isinstance(source, Tensor) for source in sources):
            return sources
        return column_images("edit_shapes", samples, self.column)

    def examples(self) -> Samples:
        """A red square that became blue, and one that did not."""
        source, edited = (_square(COLOURS[colour]) for colour in ("red", "blue"))
        meta = [{self.column: source}] * 2
        prompts = ["make the red square blue"] * 2
        return Samples(torch.stack([edited, source]), prompts, torch.zeros(2).long(), meta)

    def _number(self, score: float) -> float:
        return score if self.kind == "graded" else float(score == 1)

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, object]]) -> None:
        check_image_column("edit_shapes", self.column, prompts, meta)


def load(
    kind: ShapesKind = "graded", column: str = "image", iou: Share = 0.80, aspect: Share = 0.75
) -> Reward:
    """Load the reward.

    kind    graded: partial credit, in 0..1; strict: 1 where graded is exactly 1, otherwise 0
    column  column of the prompt file with the path of the source image
    """
    return EditShapesReward(kind, column, iou, aspect)
