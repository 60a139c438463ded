"""A rule-based checker for videos of moving coloured shapes.

A prompt names one or two shapes and their motions: "a red circle moving right and a blue square
moving left", "a green triangle standing still". Objects are found in each frame
(`rewards.catalogue.shapes`) and tracked by their colour. Two parts are scored:

* identity: every frame has exactly the objects of the prompt, by their colours, and in three
  quarters of the frames their shapes are recognised too;
* motion: each object's centre moves in the right direction, far enough, straight, never back and
  without a jump; or stays where it is.

*graded* is the mean of the two, each with partial credit, in 0..1; *strict* is 1 where graded
is exactly 1, otherwise 0. Strict accepts 99.8 % of 1,500 rendered videos. With the prompt of
another video with the same number of objects it accepts 2 of 5,970, which name the same two objects
in another order.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.catalogue import shapes
from rewards.catalogue.shapes import BACKGROUND, COLOURS, SHAPES, DetectedShape, ShapesKind
from rewards.perception.media import each_size, expect
from rewards.types import Kind, Reward, Samples, Share

SCORED_KINDS: tuple[Kind, ...] = ("video",)

MOTIONS = {  # x runs to the right, y down
    "moving right": (1, 0),
    "moving left": (-1, 0),
    "moving up": (0, -1),
    "moving down": (0, 1),
    "standing still": (0, 0),
}
STEADY = 0.75  # of the frames must show every shape
# lengths are shares of the image's side
LEAST_TRAVEL = 0.18
MOST_SIDEWAYS = 0.08
MOST_WOBBLE = 0.06  # distance of a still object from its mean place
BACK = 0.02  # tolerance of a step back or beyond the longest step, for rounding to pixels
LEAP = 3.0  # the longest step, in mean steps
LOST = 0.25  # the score falls to 0 this far beyond a limit
CHUNK_SIZE = 2**24  # values of frames that are processed at once

_ONE = rf"an? ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) ({'|'.join(MOTIONS)})"
_PROMPT = re.compile(rf"{_ONE}(?: and {_ONE})?")

Centre = tuple[float, float]


@dataclass(frozen=True)
class Actor:
    colour: str
    shape: str
    motion: str


def parse_motion(prompt: str) -> tuple[Actor, ...] | None:
    """Parse one or two actors of different colours; None for any other prompt.

    Capitals, spaces and a full stop at the end do not matter.
    """
    match = _PROMPT.fullmatch(" ".join(prompt.lower().split()).rstrip("."))
    if match is None:
        return None
    actors = [Actor(*match.groups()[:3])]
    if match[4] is not None:
        actors.append(Actor(*match.groups()[3:]))
    return tuple(actors) if len({actor.colour for actor in actors}) == len(actors) else None


def identity(video: Sequence[Sequence[DetectedShape]], actors: Sequence[Actor]) -> float:
    """1 if all frames show the same actors; otherwise the mean partial credit of the frames."""
    wanted = shapes.WantedShapes(tuple((actor.colour, actor.shape) for actor in actors))
    colours = Counter(actor.colour for actor in actors)
    all_present = all(Counter(thing.colour for thing in frame) == colours for frame in video)
    exact = sum(shapes.is_exact(frame, wanted) for frame in video)
    if all_present and exact >= STEADY * len(video):
        return 1.0
    credit = sum(shapes.grade_shapes(frame, wanted) for frame in video) / len(video)
    return min(credit, 1 - 1e-6)


def motion(path: Sequence[Centre | None], name: str) -> float:
    """Score in 0..1 of a centre's path for the named motion; None stands for frames without it.

    A product of shares, each 1 within its limit: presence, distance, straightness, forward steps.
    """
    seen = [place for place in path if place is not None]
    if len(seen) < 2:
        return 0.0
    presence = len(seen) / len(path)
    towards = MOTIONS[name]
    if towards == (0, 0):
        middle = [sum(axis) / len(seen) for axis in zip(*seen, strict=True)]
        wobble = max(((x - middle[0]) ** 2 + (y - middle[1]) ** 2) ** 0.5 for x, y in seen)
        return presence * _within(wobble, MOST_WOBBLE)
    along = [x * towards[0] + y * towards[1] for x, y in seen]
    across = [x * towards[1] + y * towards[0] for x, y in seen]
    travel = along[-1] - along[0]
    longest = LEAP * max(travel, 0.0) / (len(seen) - 1) + BACK
    steps = [after - before for before, after in pairwise(along)]
    good = sum(-BACK <= step <= longest for step in steps) / len(steps)
    far = min(1.0, max(0.0, travel / LEAST_TRAVEL))
    return presence * far * good * _within(max(across) - min(across), MOST_SIDEWAYS)


def _within(length: float, limit: float) -> float:
    return 1.0 if length <= limit else max(0.0, 1 - (length - limit) / LOST)


def follow(video: Sequence[Sequence[DetectedShape]], colour: str) -> list[Centre | None]:
    """Centre of the largest object of a colour in each frame."""
    path: list[Centre | None] = []
    for frame in video:
        of_colour = [thing for thing in frame if thing.colour == colour]
        largest = max(of_colour, key=lambda thing: thing.area, default=None)
        path.append(None if largest is None else (largest.x, largest.y))
    return path


def grade_motion(video: Sequence[Sequence[DetectedShape]], actors: Sequence[Actor]) -> float:
    """Partial credit in 0..1; exactly 1 if actors and motions match the prompt."""
    moves = [motion(follow(video, actor.colour), actor.motion) for actor in actors]
    return (identity(video, actors) + sum(moves) / len(moves)) / 2


def watch(
    media: Float[Tensor, "n f 3 h w"], iou: float, aspect: float
) -> list[list[list[DetectedShape]]]:
    """Detect the objects in each frame of each video."""
    size = max(1, CHUNK_SIZE // media[0].numel()) if len(media) else 1
    videos: list[list[list[DetectedShape]]] = []
    for part in media.split(size):
        shapes_by_frame = shapes.detect(part.flatten(0, 1), iou, aspect)
        frames = media.shape[1]
        videos += [shapes_by_frame[i : i + frames] for i in range(0, len(shapes_by_frame), frames)]
    return videos


@dataclass(frozen=True)
class MovingShapesReward:
    """One score per video; NaN for a prompt that `parse_motion` cannot read."""

    kind: ShapesKind = "graded"
    iou: float = 0.80
    aspect: float = 0.75

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "moving_shapes", "video")
        return each_size(samples, self._score)

    def _score(self, samples: Samples) -> Float[Tensor, " n"]:
        videos = watch(samples.media, self.iou, self.aspect)
        pairs = zip(videos, samples.prompts, strict=True)
        return torch.tensor([self._one(video, parse_motion(prompt)) for video, prompt in pairs])

    def _one(
        self, video: Sequence[Sequence[DetectedShape]], actors: Sequence[Actor] | None
    ) -> float:
        if actors is None:
            return float("nan")
        score = grade_motion(video, actors)
        return score if self.kind == "graded" else float(score == 1)

    def examples(self) -> Samples:
        """A red square that moves right, with its own prompt and with another."""
        video = (torch.tensor(BACKGROUND) / 255).view(3, 1, 1).repeat(5, 1, 32, 32)
        for frame in range(5):
            place = slice(3 + 3 * frame, 14 + 3 * frame)
            video[frame, :, 10:21, place] = (torch.tensor(COLOURS["red"]) / 255).view(3, 1, 1)
        prompts = ["a red square moving right", "a blue circle moving left"]
        return Samples(torch.stack([video, video]), prompts, torch.arange(2))


def load(kind: ShapesKind = "graded", iou: Share = 0.80, aspect: Share = 0.75) -> Reward:
    """Load the reward.

    kind  graded: the mean of identity and motion, in 0..1; strict: 1 where graded is exactly 1,
          otherwise 0
    """
    return MovingShapesReward(kind, iou, aspect)
