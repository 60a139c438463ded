"""GenEval, arXiv:2310.11513: presence, count, colour and position of the prompt's objects.

A detector finds objects, CLIP names their colours, rules compare them with the prompt's row:
`include` (class, count, color, position), `exclude` (class, count) and `tag`, the columns of
GenEval's own metadata files. A sample without `include` is unscored.

kind  graded    partial credit, as in Flow-GRPO's reward server, arXiv:2505.05470: for each wanted
                class 1 - |found - wanted| / wanted (below 0 for more than twice as many), the same
                for the colour, 0 or 1 for the position; the mean of all of these
      strict    1 if every count, colour and position is exactly right, else 0
      official  GenEval's own verdict: 1 if at least the wanted number of objects is present and
                right, and no `exclude` applies, else 0

Differences from the published code: the weights of the same Mask2Former come from transformers, not
mmdet; for a wrong position the reward server adds a 1 after the 0, while this code adds only the 0.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn import functional

from rewards.checks.self_test import ChecksPrompts
from rewards.perception.detect import Box, Detection, Detector, detector
from rewards.perception.embedding import Cosine, Placement, Towers, pil_images, transformers_towers
from rewards.perception.frames import Aggregate, Frames, OverFrames
from rewards.perception.hub import HubName
from rewards.types import Kind, Reward, Samples, UnitInterval

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")
NEEDED_COLUMNS = ("include",)

COLOUR_NAMES = (
    "red",
    "orange",
    "yellow",
    "green",
    "blue",
    "purple",
    "pink",
    "brown",
    "black",
    "white",
)
TEMPLATES = ("a photo of a {c} {n}", "a photo of a {c}-colored {n}", "a photo of a {c} object")
MASK_BACKGROUND = "#999"  # colour of the pixels outside an object's mask when CLIP names its colour
MOST_BOXES = 16  # objects per class, the most certain ones
OFFSET = 0.1  # least distance of two centres, as a share of the boxes' sizes
_SPELLINGS = {  # other names of COCO's classes, of GenEval's files and of mmdet's label list
    "aeroplane": "airplane",
    "motorbike": "motorcycle",
    "sofa": "couch",
    "tvmonitor": "tv",
    "television": "tv",
    "computermouse": "mouse",
    "tvremote": "remote",
    "remotecontrol": "remote",
    "computerkeyboard": "keyboard",
    "hairdryer": "hairdrier",
    "doughnut": "donut",
    "mobilephone": "cellphone",
}
GenEvalKind = Literal["graded", "strict", "official"]
GenEvalRow = Mapping[str, Any]  # one entry of `include`


def coco_class(name: str) -> str:
    """The same key for all spellings of a class: "potted plant" and "pottedplant", "tv" and
    "tvmonitor".

    Lower case without blanks, hyphens and underscores; then the synonyms of COCO's label lists.
    """
    key = re.sub(r"[\s_-]+", "", name.lower())
    return _SPELLINGS.get(key, key)


def relations(a: Box, b: Box) -> set[str]:
    """Relations of a to b: left of, right of, above, below; never two opposite ones."""
    centres = [((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in (a, b)]
    sizes = [(box[2] - box[0], box[3] - box[1]) for box in (a, b)]
    offset = [centres[0][axis] - centres[1][axis] for axis in (0, 1)]
    beyond = [abs(o) - OFFSET * (sizes[0][i] + sizes[1][i]) for i, o in enumerate(offset)]
    beyond = [max(length, 0.0) for length in beyond]
    if max(beyond) < 1e-3:
        return set()
    length = (offset[0] ** 2 + offset[1] ** 2) ** 0.5
    words = (("left of", "right of"), ("above", "below"))
    return {words[axis][offset[axis] > 0] for axis in (0, 1) if beyond[axis] / length > 0.5}


def surest(things: Sequence[Detection], least: float) -> dict[str, list[Detection]]:
    """Objects that score above `least`, by class, most confident first."""
    by_name: dict[str, list[Detection]] = {}
    for thing in sorted(things, key=lambda thing: -thing.score):
        if thing.score <= least:
            break
        of_class = by_name.setdefault(coco_class(thing.name), [])
        if len(of_class) < MOST_BOXES:
            of_class.append(thing)
    return by_name


@dataclass(frozen=True)
class Colours:
    """Names object colours with CLIP, as GenEval does: the mean embedding of three templates per
    colour."""

    towers: Towers

    def __call__(self, image: Image.Image, things: Sequence[Detection], name: str) -> list[str]:
        texts = [t.format(c=colour, n=name) for colour in COLOUR_NAMES for t in TEMPLATES]
        words = self.towers.texts(texts).unflatten(0, (len(COLOUR_NAMES), len(TEMPLATES)))
        words = functional.normalize(words.mean(1), dim=-1)
        seen = self.towers.images([cut_out(image, thing) for thing in things])
        return [COLOUR_NAMES[place] for place in (seen @ words.T).argmax(1).tolist()]


def cut_out(image: Image.Image, thing: Detection) -> Image.Image:
    """Crop the object's box, with gray outside its mask; at least one pixel."""
    if thing.mask is not None:
        blank = Image.new("RGB", image.size, MASK_BACKGROUND)
        image = Image.composite(image, blank, Image.fromarray(thing.mask))
    left, top, right, bottom = (round(place) for place in thing.box)
    return image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))


@dataclass(frozen=True)
class Scene:
    """Objects found in one image, and the function that names their colours."""

    image: Image.Image
    things: Mapping[str, Sequence[Detection]]
    colours: Any  # (image, things, name) -> a colour each

    def of(self, wanted: GenEvalRow) -> Sequence[Detection]:
        return self.things.get(coco_class(wanted["class"]), ())

    def in_colour(self, things: Sequence[Detection], wanted: GenEvalRow) -> int:
        """Number of objects of the wanted colour."""
        named = self.colours(self.image, things, wanted["class"]) if things else []
        return named.count(wanted["color"])


def in_place(
    things: Sequence[Detection], wanted: GenEvalRow, groups: Sequence[Sequence[Detection] | None]
) -> bool:
    """Whether every object has the required relation to every object of the named group."""
    relation, group = wanted["position"]
    other_things = groups[int(group)]
    return other_things is not None and all(
        relation in relations(thing.box, other.box) for thing in things for other in other_things
    )


def grade_objects(scene: Scene, include: Sequence[GenEvalRow]) -> tuple[float, bool]:
    """Grade a scene: the partial credit in 0..1, and whether every object is exactly right."""
    credits: list[float] = []
    groups: list[Sequence[Detection] | None] = []
    for wanted in include:
        things, count = scene.of(wanted), wanted["count"]
        credits.append(1 - abs(count - len(things)) / count)
        right = len(things) == count
        coloured, placed = (wanted.get(key) is not None for key in ("color", "position"))
        if not right and (coloured or placed):
            credits.append(0.0)
        if right and coloured:
            named = scene.in_colour(things, wanted)
            credits.append(1 - abs(count - named) / count)
            right = named == count
        if right and placed:
            right = in_place(things, wanted, groups)
            credits.append(float(right))
        groups.append(things if right else None)
    return sum(credits) / len(credits), None not in groups


def official(scene: Scene, include: Sequence[GenEvalRow], exclude: Sequence[GenEvalRow]) -> bool:
    """GenEval's own verdict. Colour and position are taken from the most confident objects."""
    groups: list[Sequence[Detection] | None] = []
    for wanted in include:
        things = scene.of(wanted)[: wanted["count"]]
        right = len(things) == wanted["count"]
        if right and wanted.get("color") is not None:
            right = scene.in_colour(things, wanted) == wanted["count"]
        if right and wanted.get("position") is not None:
            right = in_place(things, wanted, groups)
        groups.append(things if right else None)
    too_many = any(len(scene.of(wanted)) >= wanted["count"] for wanted in exclude)
    return None not in groups and not too_many


@dataclass(frozen=True)
class GenEval:
    """GenEval's check of objects. `threshold`: minimum score of an object; `counting`: the same for
    rows with the tag counting."""

    detect: Detector
    colours: Any
    kind: GenEvalKind = "graded"
    threshold: float = 0.3
    counting: float = 0.9

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        score = torch.full((len(samples.prompts),), torch.nan)
        rows = [row for row, meta in enumerate(samples.meta) if meta.get("include")]
        if not rows:
            return score
        images = pil_images(samples.take(rows))
        seen = self.detect(images, min(self.threshold, self.counting))
        for row, image, things in zip(rows, images, seen, strict=True):
            score[row] = self._score(image, things, samples.meta[row])
        return score

    def _score(
        self, image: Image.Image, things: Sequence[Detection], meta: Mapping[str, Any]
    ) -> float:
        include, exclude = meta["include"], meta.get("exclude") or ()
        for wanted in (*include, *exclude):
            self._check(wanted)
        least = self.counting if meta.get("tag") == "counting" else self.threshold
        scene = Scene(image, surest(things, least), self.colours)
        if self.kind == "official":
            return float(official(scene, include, exclude))
        graded, strict = grade_objects(scene, include)
        return graded if self.kind == "graded" else float(strict)

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError for the first row whose class, count or colour cannot be judged."""
        for row, columns in enumerate(meta, start=1):
            for wanted in (*(columns.get("include") or ()), *(columns.get("exclude") or ())):
                try:
                    self._check(wanted)
                except ValueError as error:
                    prompt = prompts[row - 1][:60]
                    raise ValueError(f"{error} (row {row}, prompt {prompt!r})") from error

    def _check(self, wanted: GenEvalRow) -> None:
        name, count = wanted.get("class"), wanted.get("count")
        if not isinstance(name, str) or not isinstance(count, int) or count < 1:
            raise ValueError(f"geneval: {dict(wanted)} needs a class and a count of at least 1")
        if coco_class(name) not in {coco_class(label) for label in self.detect.names}:
            near = difflib.get_close_matches(name, self.detect.names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"geneval: the detector does not know the class {name!r}{hint}")
        if wanted.get("color") is not None and wanted["color"] not in COLOUR_NAMES:
            raise ValueError(
                f"geneval: {wanted['color']!r} is not one of {', '.join(COLOUR_NAMES)}"
            )


@dataclass(frozen=True)
class GenEvalOverFrames(OverFrames):
    """GenEval for images and videos. The self-test checks the prompts and CLIP's colour names, but
    not the detector: not every detector finds objects in synthetic images."""

    parts: Mapping[str, Reward] = field(default_factory=dict)

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        if isinstance(self.reward, ChecksPrompts):
            self.reward.check_prompts(prompts, meta)


def load(
    model: HubName = "facebook/mask2former-swin-small-coco-instance",
    clip: HubName = "openai/clip-vit-large-patch14",
    kind: GenEvalKind = "graded",
    threshold: UnitInterval = 0.3,
    counting: UnitInterval = 0.9,
    frames: Frames = "all",
    aggregate: Aggregate = "mean",
    device: str = "auto",
) -> Reward:
    """Load the reward.

    model      detector or segmenter of COCO's classes: a folder or a name on the hub
    clip       CLIP model that names the colours of objects: a folder or a name on the hub
    kind       graded: partial credit; strict: 1 if every count, colour and position is exactly
               right, otherwise 0; official: GenEval's own verdict, 0 or 1
    threshold  confidence beyond which a detected object counts, in [0, 1]; larger counts fewer
               objects
    counting   the same for rows with the tag `counting`, in [0, 1]
    """
    placement = Placement.of(device)
    towers = transformers_towers(clip, placement)
    reward = GenEval(detector(model, placement), Colours(towers), kind, threshold, counting)
    parts = {"colours": OverFrames(Cosine(towers), "geneval", frames, aggregate)}
    return GenEvalOverFrames(reward, "geneval", frames, aggregate, parts)
