"""A plan of votes: which samples are compared, in which order, and on which side each is shown.

The plan is made once, from a seed, and written before the first vote. So the number of votes is
fixed in advance, and a rater who comes back meets the next pair of the same order.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from flowrl.bounded_files import bounded_json
from flowrl.errors import UserError
from flowrl.json_text import json_text
from flowrl.pages.plain_files import check_readable, plain_bytes
from flowrl.pages.records import MediaKind
from flowrl.prompts.files import VOTED_SAMPLES, VOTES_TABLE
from flowrl.prompts.prompt_set import has_half_pair
from flowrl.whole_file import write_whole
from rewards.perception.moving import MOST_VIDEO_FRAMES

MOST_PLAN = 2**26  # bytes
MOST_SAMPLE = 2**28  # bytes of an image, a video or a sound
MOST_SHOWN_TEXT = 2**22  # bytes of a text
PLAN = "plan.json"
PLAN_FORMAT = 1
ONE_REPEAT_IN = 10  # one pair in so many is shown a second time
LEAST_GAP = 15  # pairs from the first showing of a pair to its second
SHARED = 0.2  # part of the pairs that all of several raters see
SourceKind = Literal["run", "runs", "base", "folder", "preferences", "asked"]
# Names that flowrl gives. Others could lead out of the folder, whose plan anybody may have written.
_NAME = re.compile(rf"{VOTED_SAMPLES}/[0-9A-Za-z-]+\.(png|apng|txt|wav)")
KIND_OF_SUFFIX: Mapping[str, MediaKind] = {
    ".png": "image",
    ".apng": "video",
    ".wav": "sound",
    ".txt": "text",
}

CLOSED = ConfigDict(extra="forbid")  # a plan that anybody may have written


class Showing(NamedTuple):
    """One showing in a rater's order: a pair, whether its a is on the left, and whether it is the
    pair's second showing."""

    pair: int
    a_left: bool
    again: bool


@dataclass(frozen=True)
class PlannedSample:
    """A sample of a plan.

    file     in the folder of the votes: the pixels that rewards score, as a PNG, an animated one
             for a video; a WAV of sound alone; or a text
    origin   where it is from: a file, or the weights that made it
    scores   the run's recorded scores; None where unscored
    source   the image that it is an edit of, in the folder too
    sound    of a video, in the folder too; of sound alone its file
    drawing  of sound alone: its waveform as an image, in the folder too
    frames   of a video
    seconds  that it is shown for before it begins again
    """

    __pydantic_config__ = CLOSED

    file: str
    prompt: str
    origin: str
    scores: Mapping[str, float | None] = field(default_factory=dict)
    source: str = ""
    sound: str = ""
    drawing: str = ""
    frames: Annotated[int, Field(ge=1, le=MOST_VIDEO_FRAMES)] = 1
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @property
    def kind(self) -> MediaKind:
        return KIND_OF_SUFFIX[Path(self.file).suffix]

    @property
    def files(self) -> tuple[str, ...]:
        """All that the folder has of it: the sample, its source, its sound and its drawing."""
        names = (self.file, self.source, self.sound, self.drawing)
        return tuple(name for name in dict.fromkeys(names) if name)


@dataclass(frozen=True)
class VotePlan:
    """Samples, pairs of them, and the order of each rater.

    sides  names of the two sides that are compared, a first; empty if there are none, such as in a
           folder
    pairs  rows of the samples (a, b); with sides, a is the first side's
    turns  by rater
    """

    __pydantic_config__ = CLOSED

    question: str
    seed: int
    kind: SourceKind
    source: str
    sides: tuple[str, ...]
    samples: Sequence[PlannedSample]
    pairs: Sequence[tuple[int, int]]
    turns: Mapping[str, Sequence[Showing]]

    def write(self, folder: Path) -> None:
        tree = {"format": PLAN_FORMAT, **asdict(self)}
        write_whole(folder / PLAN, json_text(tree, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "VotePlan":
        """Read the plan of a folder of votes. UserError for a folder without one, or a damaged
        plan."""
        path = folder / PLAN
        if not path.is_file():
            way = f": {way_back(folder)}" if (folder / VOTES_TABLE).is_file() else ""
            raise UserError(f"{folder} is no folder of votes: it has no {PLAN}{way}")
        try:
            return cls._of(bounded_json(path, MOST_PLAN))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}): {way_back(folder)}") from error

    @classmethod
    def _of(cls, tree: Any) -> "VotePlan":
        if tree["format"] != PLAN_FORMAT:
            raise ValueError(f"format {tree['format']}, not {PLAN_FORMAT}")
        try:
            plan = TypeAdapter(cls).validate_python(
                {name: value for name, value in tree.items() if name != "format"}
            )
        except ValidationError as error:
            raise ValueError(first_fault(error)) from error
        if any(has_half_pair(text) for text in plan.texts()):
            raise ValueError("a text with half a surrogate pair")
        if not all(_is_whole(sample) for sample in plan.samples):
            raise ValueError("a sample of an unknown kind, or in a file outside its folder")
        inside = all(0 <= row < len(plan.samples) for pair in plan.pairs for row in pair)
        turns = (turn for order in plan.turns.values() for turn in order)
        if not inside or not all(0 <= turn.pair < len(plan.pairs) for turn in turns):
            raise ValueError("a pair or a turn names what is not there")
        return plan

    def texts(self) -> Iterator[str]:
        """All that is not a name of flowrl's own."""
        yield from (self.question, self.source, *self.sides, *self.turns)
        for sample in self.samples:
            yield from (sample.prompt, sample.origin, *sample.scores)

    def prompt_of(self, pair: int) -> str:
        return self.samples[self.pairs[pair][0]].prompt


def first_fault(error: ValidationError) -> str:
    """The first of the values that a file has in another form than it should."""
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg'].lower()}"


def way_back(folder: Path) -> str:
    """Advice for a folder of votes whose plan or log is damaged. Its table, if it has one,
    was made while both were whole."""
    if not (folder / VOTES_TABLE).is_file():
        return "bring it back from a copy, or start the votes again"
    return f"bring it back from a copy, or name {folder / VOTES_TABLE} itself to read its votes"


def _is_whole(sample: PlannedSample) -> bool:
    """Whether its names are ones that flowrl gives, of the kinds that they stand for."""
    kinds = (
        (sample.file, KIND_OF_SUFFIX),
        (sample.source, (".png",)),
        (sample.sound, (".wav",)),
        (sample.drawing, (".png",)),
    )
    return all(
        _NAME.fullmatch(name) is not None and Path(name).suffix in suffixes
        for name, suffixes in kinds
        if name
    ) and bool(sample.file)


def sample_bytes(folder: Path, name: str) -> bytes:
    """The content of a file of a plan. UserError for a missing or too large file, and for a link
    that leads out of the folder."""
    with _named(folder / name):
        return plain_bytes(folder, folder / name, _most(name))


def sample_text(folder: Path, name: str) -> str:
    """The same of a text. UserError also for one that is not UTF-8."""
    with _named(folder / name):
        return sample_bytes(folder, name).decode("utf-8")


def check_sample_files(folder: Path, plan: VotePlan) -> None:
    """UserError for the first file of a plan that is not there or cannot be shown."""
    for name in dict.fromkeys(name for sample in plan.samples for name in sample.files):
        with _named(folder / name):
            check_readable(folder, folder / name, _most(name))


def _most(name: str) -> int:
    return MOST_SHOWN_TEXT if name.endswith(".txt") else MOST_SAMPLE


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): bring the file back, or start the votes again"
        ) from error


def orders(pairs: int, raters: int, seed: int) -> dict[str, list[Showing]]:
    """The turns of each rater, `rater-1` and so on.

    One rater sees all pairs. Of several, all see a fifth of the pairs, and each of the other pairs
    is seen by one of them, in turn.
    """
    rng = np.random.default_rng([seed, pairs, raters])
    drawn = rng.permutation(pairs).tolist()
    shared = pairs if raters == 1 else math.ceil(SHARED * pairs)
    turns = {}
    for rater in range(raters):
        of_rater = [*drawn[:shared], *drawn[shared + rater :: raters]]
        turns[f"rater-{rater + 1}"] = _order(rng.permutation(of_rater).tolist(), rng)
    return turns


def _order(pairs: Sequence[int], rng: np.random.Generator) -> list[Showing]:
    """All pairs, and one in ten a second time with sides changed, at least `LEAST_GAP` pairs
    later."""
    count = len(pairs)
    left = rng.random(count) < 0.5
    placed = [(float(i), Showing(pair, bool(left[i]), False)) for i, pair in enumerate(pairs)]
    early = rng.permutation(max(0, count - LEAST_GAP + 1))[: count // ONE_REPEAT_IN]
    for i in sorted(early.tolist()):
        after = rng.integers(i + LEAST_GAP - 1, count) + 0.5
        placed.append((float(after), Showing(pairs[i], not left[i], True)))
    return [turn for _, turn in sorted(placed, key=lambda place_and_turn: place_and_turn[0])]


def pairs_within(groups: Sequence[int], most: int | None, seed: int) -> list[tuple[int, int]]:
    """Pairs of samples of the same group, drawn by the seed: one pair of each group, then a second
    of each, and so on, up to `most`."""
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    rng = np.random.default_rng([seed, len(groups)])
    columns = []
    for of_prompt in rows.values():
        pairs_of_prompt = [(a, b) for i, a in enumerate(of_prompt) for b in of_prompt[i + 1 :]]
        columns.append([pairs_of_prompt[i] for i in rng.permutation(len(pairs_of_prompt))])
    depth = max((len(column) for column in columns), default=0)
    in_order = [column[k] for k in range(depth) for column in columns if k < len(column)]
    return in_order[:most]
