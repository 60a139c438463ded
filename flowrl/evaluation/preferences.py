"""Preference data sets: human verdicts on pairs or rankings of samples, in several layouts.

plain        prompt, a, b, label: 1 or "a" (a is better), 0 or "b", 0.5 or "tie"; of edits, the
             image that was edited as source_image, as in chosen
plain_texts  prompt, a_text, b_text, label: the same, with texts as samples
chosen       prompt, chosen, rejected: the first is better; also the binarized form of
             data-is-better-together/open-image-preferences-v1
texts        the same, with texts or conversations: hh-rlhf (without a prompt), UltraFeedback. Known
             by cells with spaces, and by lists of messages
ratings      prompt, sample, rating: one sample, or a list of them, with a number each; higher is
             better, and samples of one prompt are compared
pickapic     caption, jpg_0, jpg_1, label_0; Pick-a-Pic, arXiv:2305.01569
imagereward  prompt, generations, ranking; ImageReward's test set, arXiv:2304.05977
imagereward_db    prompt, image, rank: ImageRewardDB's groups, and its single rows
imagereward_pairs prompt, img_better, img_worse: its pairs
hpdv2        prompt, image_path, rank; HPDv2's test set, arXiv:2306.09341
hpdv2_pairs  prompt, file_path, human_preference; HPDv2's training set
hpdv2_hub    prompt, image, human_preference: the same, as `datasets` loads it
richhf       prompt, image, overall_score, artifact_score; RichHF-18K, arXiv:2312.10240: ratings
rapidata     prompt, image1, image2, weighted_results_image1_preference and ..._image2_...: the
             shares of votes; other dimensions are alignment and coherence
mmrb2        prompt_content, response_a, response_b, human_preference; MMRB2, arXiv:2512.16899: its
             tasks whose responses are one image (t2i, edit)
genai        left_output_image, right_output_image, vote_type; GenAI-Bench, arXiv:2406.04485
genai_video  left_video, right_video, vote_type
videogen     prompt, path_A, path_B, and a column of A, B, same; VideoGen-RewardBench, 2501.13918
HPDv3 and data sets of edits: `flowrl.evaluation.edit_preferences`; files of argilla and Label
Studio: `flowrl.evaluation.labelling_tools`

The columns determine the layout. Where a layout has lists of samples, rows of single samples are
taken together by their prompt. A column of judgements whose name contains `rank` is better if
lower, another if higher. A row may have a `category`; rewards get all other columns unchanged. Rank
1 is the best; equal ranks are ties.
"""

import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from flowrl.errors import UserError
from flowrl.evaluation.edit_preferences import EDIT_LAYOUTS, with_more
from flowrl.evaluation.labelling_tools import TOOL_LAYOUTS
from flowrl.evaluation.measure import Item
from flowrl.evaluation.preference_rows import (
    Answer,
    JudgedRow,
    PreferenceLayout,
    PreferenceRow,
    edited_source,
)
from flowrl.evaluation.sources import MEDIA_SUFFIXES, Source
from flowrl.evaluation.tables import table_of
from flowrl.prompts.chat import message_of, read_chat
from flowrl.prompts.conversations import answer_in, with_prompts_found
from flowrl.prompts.prompt_set import PromptRow, checked_text, has_half_pair
from flowrl.prompts.source import OTHER_SEPARATOR, PromptRows, Row, check_column, other_separator
from rewards.types import cell

_FILES = tuple(MEDIA_SUFFIXES)
PREFERENCE_WORDS = {
    "a": 1.0, "left": 1.0, "leftvote": 1.0, "b": 0.0, "right": 0.0, "rightvote": 0.0, "tie": 0.5,
    "same": 0.5, "tievote": 0.5, "bothbad_vote": 0.5,
}  # fmt: skip


def preference_label(cell: Any, place: str) -> float:
    """P(a preferred) from a word or a number."""
    if isinstance(cell, str) and cell.strip().lower() in PREFERENCE_WORDS:
        return PREFERENCE_WORDS[cell.strip().lower()]
    try:
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0 <= value <= 1:
        raise UserError(
            f"{place}: the label is {reprlib.repr(cell)}, but must be a, b, tie or a number in "
            "0..1: correct or remove the row"
        )
    return value


def _plain(row: PreferenceRow, dimension: str, place: str) -> JudgedRow:
    label = preference_label(row[dimension], place)
    return JudgedRow(row["prompt"], (row["a"], row["b"]), label, more=edited_source(row))


def _plain_texts(row: PreferenceRow, dimension: str, place: str) -> JudgedRow:
    answers = [_answer(row[side], f"{place}, {side}") for side in ("a_text", "b_text")]
    return JudgedRow(row["prompt"], answers, preference_label(row[dimension], place))


def _chosen(row: PreferenceRow, _dimension: str, _place: str) -> JudgedRow:
    samples = (row["chosen"], row["rejected"])
    return JudgedRow(row["prompt"], samples, 1.0, more=edited_source(row))


def _texts(row: PreferenceRow, _dimension: str, place: str) -> JudgedRow:
    """Two answers, each a text or a conversation whose last message it is."""
    prompt = row["prompt"]
    if isinstance(prompt, list):
        prompt = read_chat(prompt, f"{place}, prompt", True, lambda image: image)
    answers = [_answer(row[side], f"{place}, {side}") for side in ("chosen", "rejected")]
    return JudgedRow(prompt, answers, 1.0)


def _answer(value: Any, place: str) -> Answer:
    if (text := answer_in(value)) is None:
        raise UserError(
            f"{place}: {reprlib.repr(value)} is no text, and no message of the assistant: correct "
            "or remove the row"
        )
    if has_half_pair(text):
        raise UserError(f"{place}: the answer contains half a surrogate pair, which is no text")
    return Answer(text)


_PAIR = ("chosen", "rejected")


def _holds_text(value: Any, folder: Path) -> bool:
    """Whether a cell of chosen or rejected is an answer rather than the name of a file: an answer
    may be one word."""
    if isinstance(value, list) or message_of(value) is not None:
        return True
    if not isinstance(value, str) or value.partition("#")[0].lower().endswith(_FILES):
        return False
    if any(map(str.isspace, value)) or not value:
        return bool(value)
    return "://" not in value and "/" not in value and not os.path.exists(folder / value)


def _answered(table: PromptRows, folder: Path, layout: str | None, name: str) -> bool:
    """Whether the table's samples are answers. UserError if some cells name files that are there:
    they would be compared by the letters of their names."""
    cells = [row.get(side) for row in table.rows for side in _PAIR]
    if not any(_holds_text(value, folder) for value in cells):
        return False
    for number, value in enumerate(cells if layout is None else ()):
        if isinstance(value, str) and value.lower().endswith(_FILES):
            if os.path.isfile(folder / value):
                row, side = divmod(number, len(_PAIR))
                raise UserError(
                    f"{name}, {table.places[row]}: {_PAIR[side]} is the file {value}, and other "
                    "cells are texts: make a table of each kind, or choose --layout texts to "
                    "compare the words"
                )
    return True


_PLACES = re.compile(r"(?:^|_)(?:id|idx|index)$")  # of columns that count sides from 0


def _by_place(
    rows: Sequence[Row], numbers: Sequence[str], label: str, named: str, name: str
) -> Sequence[Row]:
    """Rows whose label is the place of the better side, 0 for the first, with labels in its stead
    (PKU-SafeRLHF's better_response_id). UserError for another place."""
    labels = []
    for row, number in zip(rows, numbers, strict=True):
        value = row.get(label)
        place = int(value) if value in ("0", "1") else value  # a CSV has texts
        if place not in (0, 1):
            raise UserError(
                f"{name}, {number}: {named} counts sides from 0, so it must be 0 or 1, not "
                f"{reprlib.repr(value)}: correct or remove the row"
            )
        labels.append(1 - place)
    return [{**row, label: chosen} for row, chosen in zip(rows, labels, strict=True)]


def _pickapic(row: PreferenceRow, dimension: str, place: str) -> JudgedRow | None:
    if row.get("has_label") is False:
        return None
    return JudgedRow(
        row["caption"], (row["jpg_0"], row["jpg_1"]), preference_label(row[dimension], place)
    )


def _ranked(media: str) -> Callable[[PreferenceRow, str, str], JudgedRow | None]:
    def read(row: PreferenceRow, dimension: str, place: str) -> JudgedRow | None:
        ranks = row[dimension]
        if not isinstance(ranks, list) or len(ranks) != len(row[media]):
            raise UserError(f"{place}: {dimension} and {media} must be two lists of equal length")
        judged = [(m, _number(n, place)) for m, n in zip(row[media], ranks, strict=True)]
        ranked = [(m, number) for m, number in judged if number is not None]
        values = [number for _, number in ranked]
        if "rank" not in dimension.lower():  # ratings: rank 1 has none above it
            values = [1.0 + sum(other > value for other in values) for value in values]
        return JudgedRow(row["prompt"], [m for m, _ in ranked], ranks=values)

    return read


def _number(cell: Any, place: str) -> float | None:
    """A rank or rating; None for an empty cell."""
    if cell is None or cell == "":
        return None
    try:
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        value = math.inf
    if math.isinf(value):
        raise UserError(
            f"{place}: {reprlib.repr(cell)} is no rank or rating: expected a number, or an empty "
            "cell for none"
        )
    return None if math.isnan(value) else value


def _hpdv2_pairs(row: PreferenceRow, _dimension: str, _place: str) -> JudgedRow | None:
    first, second = row["human_preference"]
    return JudgedRow(row["prompt"], row["file_path"], (1 + first - second) / 2)


def _hpdv2_hub(row: PreferenceRow, _dimension: str, place: str) -> JudgedRow | None:
    """A pair of the training set, or the ranked images of the test set, both as ranks."""
    if not row["human_preference"]:
        return _ranked("image")(row, "rank", place)
    ranks = [2.0 - chosen for chosen in row["human_preference"]]
    return JudgedRow(row["prompt"], row["image"], ranks=ranks)


def _better(row: PreferenceRow, _dimension: str, _place: str) -> JudgedRow:
    return JudgedRow(row["prompt"], (row["img_better"], row["img_worse"]), 1.0)


def _rapidata(row: PreferenceRow, dimension: str, place: str) -> JudgedRow | None:
    """The share of the votes, weighted by the voters' reliability, that the first image has."""
    other = dimension.replace("image1", "image2")
    if other == dimension:
        raise UserError(
            f"--dimension: {dimension} does not count votes for the first image: use a column such "
            "as weighted_results_image1_preference"
        )
    if other not in row:
        raise UserError(
            f"{place}: beside {dimension} there is no {other}, which counts the votes for the "
            "second image: add that column"
        )
    first, second = (_number(row[name], place) for name in (dimension, other))
    if first is None or second is None or first + second <= 0:
        return None
    return JudgedRow(row["prompt"], (row["image1"], row["image2"]), first / (first + second))


def _mmrb2(row: PreferenceRow, dimension: str, place: str) -> JudgedRow:
    shown, texts = _parts(row["prompt_content"], place)
    media = []
    for side in ("response_a", "response_b"):
        images, _ = _parts(row[side].get("response_content"), place)
        if len(images) != 1:
            raise UserError(
                f"{place}: {side} has {len(images)} images, and a sample is one: only the tasks "
                "t2i and edit can be read"
            )
        media += images
    more = {"source": shown[0]} if len(shown) == 1 else {}
    label = preference_label(row[dimension], place)
    return JudgedRow("\n".join(texts), media, label, more=more)


def _parts(content: Any, place: str) -> tuple[list[Any], list[str]]:
    """Images and texts of a list of parts, each a kind and a value."""
    if not isinstance(content, list) or not all(
        isinstance(part, list) and len(part) == 2 and part[0] in ("image", "text")
        for part in content
    ):
        raise UserError(f"{place}: expected a list of parts such as [image, PATH] or [text, WORDS]")
    images, texts = ([value for kind, value in content if kind == k] for k in ("image", "text"))
    return images, texts


def _sides(left: str, right: str) -> Callable[[PreferenceRow, str, str], JudgedRow | None]:
    def read(row: PreferenceRow, dimension: str, place: str) -> JudgedRow | None:
        prompt = row.get("prompt") or row.get("instruct_prompt")
        label = preference_label(row[dimension], place)
        return JudgedRow(prompt, (row[left], row[right]), label, more=edited_source(row))

    return read


LAYOUTS = {
    "pickapic": PreferenceLayout(("caption", "jpg_0", "jpg_1", "label_0"), _pickapic, "label_0"),
    "imagereward": PreferenceLayout(
        ("prompt", "generations", "ranking"), _ranked("generations"), "ranking", "generations"
    ),
    "imagereward_pairs": PreferenceLayout(("prompt", "img_better", "img_worse"), _better),
    "hpdv2_hub": PreferenceLayout(("prompt", "image", "human_preference"), _hpdv2_hub),
    "hpdv2": PreferenceLayout(
        ("prompt", "image_path", "rank"), _ranked("image_path"), "rank", "image_path"
    ),
    "hpdv2_pairs": PreferenceLayout(("prompt", "file_path", "human_preference"), _hpdv2_pairs),
    "imagereward_db": PreferenceLayout(
        ("prompt", "image", "rank"), _ranked("image"), "rank", "image"
    ),
    "richhf": PreferenceLayout(
        ("prompt", "image", "overall_score", "artifact_score"),
        _ranked("image"),
        "overall_score",
        "image",
    ),
    "rapidata": PreferenceLayout(
        ("prompt", "image1", "image2", "weighted_results_image1_preference"),
        _rapidata,
        "weighted_results_image1_preference",
    ),
    "mmrb2": PreferenceLayout(
        ("prompt_content", "response_a", "response_b", "human_preference"),
        _mmrb2,
        "human_preference",
    ),
    "genai": PreferenceLayout(
        ("left_output_image", "right_output_image", "vote_type"),
        _sides("left_output_image", "right_output_image"),
        "vote_type",
    ),
    "genai_video": PreferenceLayout(
        ("left_video", "right_video", "vote_type"), _sides("left_video", "right_video"), "vote_type"
    ),
    "videogen": PreferenceLayout(
        ("prompt", "path_A", "path_B"), _sides("path_A", "path_B"), "Overall"
    ),
    "plain": PreferenceLayout(("prompt", "a", "b", "label"), _plain, "label"),
    "plain_texts": PreferenceLayout(("prompt", "a_text", "b_text", "label"), _plain_texts, "label"),
    "chosen": PreferenceLayout(("prompt", "chosen", "rejected"), _chosen),
    "texts": PreferenceLayout(("prompt", "chosen", "rejected"), _texts),
    "ratings": PreferenceLayout(
        ("prompt", "sample", "rating"), _ranked("sample"), "rating", "sample"
    ),
    **EDIT_LAYOUTS,
    **TOOL_LAYOUTS,
}

PROMPT_COLUMN_OF = {  # the others: prompt
    "pickapic": "caption",
    "editscore_bench": "instruction",
    "editreward_bench": "instruction",
    "mmrb2": "prompt_content",
}


@dataclass(frozen=True)
class Preferences:
    """n samples of c prompts, contiguous by group, and p pairs of them.

    edited  rows of samples that are edits: their `source` is the image that was edited. Of other
            samples a column of this name is the file's own, such as that of votes.
    """

    name: str
    layout: str
    items: tuple[Item, ...]
    a: Int[np.ndarray, " p"]  # rows of items
    b: Int[np.ndarray, " p"]
    label: Float[np.ndarray, " p"]  # P(a preferred)
    category: tuple[str, ...]  # [p], "" for none
    cluster: Int[np.ndarray, " p"]  # the prompt's number
    rank: Float[np.ndarray, " n"] | None  # 1 is best, if whole groups were ordered
    unlabelled: int = 0  # rows without a judgement
    rows: tuple[Mapping[str, Any], ...] = ()  # [p] the file's row of each pair
    edited: frozenset[int] = frozenset()

    @property
    def texts(self) -> bool:
        """Whether the samples are texts, of which there are no edits and no images."""
        return self.items[0].source.text is not None

    @property
    def clusters(self) -> int:
        return int(self.cluster.max()) + 1

    @property
    def groups(self) -> list[Int[np.ndarray, " _"]]:
        """Rows of each group."""
        of = np.array([item.group for item in self.items])
        return [np.flatnonzero(of == g) for g in range(of.max() + 1)]


@dataclass
class _Builder:
    items: list[Item] = field(default_factory=list)
    pairs: list[tuple[int, int, float, str, int, Mapping[str, Any]]] = field(default_factory=list)
    ranks: list[float] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)
    edited: set[int] = field(default_factory=set)

    def add(self, judged: JudgedRow, row: PreferenceRow, folder: Path, place: str) -> None:
        checked_text(judged.prompt, place)
        row = with_more(row, judged, folder, place)
        sources = [
            Source(f"{place}, sample {i + 1}", text=str(m))
            if isinstance(m, Answer)
            else Source.of(m, folder, f"{place}, sample {i + 1}")
            for i, m in enumerate(judged.media)
        ]
        number = self.prompts.setdefault(judged.prompt, len(self.prompts))
        group = len(self.ranks) if judged.ranks else number
        meta = PromptRow({k: v for k, v in row.items() if not isinstance(v, bytes)}, place)
        rows = []
        for i, source in enumerate(sources):
            self.items.append(Item(source, judged.prompt, group, meta))
            rows.append(len(self.items) - 1)
            if "source" in judged.more:
                self.edited.add(rows[-1])
            if judged.ranks:
                self.ranks.append(judged.ranks[i])
        category = str(row.get("category") or "")
        for i, j in combinations(range(len(rows)), 2):
            gap = judged.ranks[j] - judged.ranks[i] if judged.ranks else 0.0
            label = judged.label if judged.label is not None else (1 + np.sign(gap)) / 2
            self.pairs.append((rows[i], rows[j], float(label), category, number, meta))

    def finish(self, name: str, layout: str, unlabelled: int) -> Preferences:
        """Build the data set, with contiguous groups and each sample once."""
        keys = [
            (item.group, item.source.text or item.source.data or item.source.name)
            for item in self.items
        ]
        if self.ranks:
            keys = [(item.group, i) for i, item in enumerate(self.items)]
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        order = sorted(first.values(), key=lambda i: (self.items[i].group, i))
        groups = {g: i for i, g in enumerate(dict.fromkeys(self.items[i].group for i in order))}
        at = {i: index for index, i in enumerate(order)}
        a, b, label, category, cluster, rows = zip(*self.pairs, strict=True)
        return Preferences(
            name=name,
            layout=layout,
            items=tuple(self.items[i]._replace(group=groups[self.items[i].group]) for i in order),
            a=np.array([at[first[keys[i]]] for i in a]),
            b=np.array([at[first[keys[i]]] for i in b]),
            label=np.array(label),
            category=tuple(category),
            cluster=np.array(cluster),
            rank=np.array(self.ranks)[order] if self.ranks else None,
            unlabelled=unlabelled,
            rows=tuple(rows),
            edited=frozenset(at[i] for i in order if i in self.edited),
        )


def layout_of(columns: Sequence[str], place: str, named: Iterable[str] = ()) -> str:
    """The layout of a table: one that has all `named` columns, if there are some. UserError if
    none fits."""
    for name, layout in LAYOUTS.items():
        if set(layout.columns) <= set(columns) and set(named) <= set(layout.columns):
            return name
    if other_separator(columns):
        raise UserError(f"{place}: {OTHER_SEPARATOR}")
    wanted = "; ".join(f"{name}: {', '.join(layout.columns)}" for name, layout in LAYOUTS.items())
    raise UserError(
        f"{place}: the columns {', '.join(columns)} match no known layout ({wanted}); name them "
        "with --columns, such as prompt=caption,chosen=best,rejected=other"
    )


@dataclass(frozen=True)
class ReadOptions:
    """The part of a data set to read, and how to read it."""

    layout: str | None = None  # by the columns if None
    dimension: str | None = None  # the column of labels; the layout's own if None
    images: Path | None = None  # the folder of relative paths; the file's folder if None
    prompts: int | None = None  # at most so many, drawn by the seed
    seed: int = 0
    columns: Mapping[str, str] = field(default_factory=dict)  # a layout's column: the file's


def with_columns(rows: Sequence[Row], columns: Mapping[str, str], place: str) -> Sequence[Row]:
    """The rows with the columns of a layout under the names of the file, which may be nested.
    UserError for a column that no row has."""
    for name in columns.values():
        check_column(rows, name, place, "--columns")
    if not columns:
        return rows
    return [{**row, **{new: cell(row, old) for new, old in columns.items()}} for row in rows]


def with_lists(
    rows: Sequence[Row], numbers: Sequence[str], samples: str, judgement: str, prompt: str
) -> tuple[Sequence[Row], Sequence[str]]:
    """Rows of lists, and their places: those of one prompt (and `prompt_id`) together, where rows
    have one sample each."""
    if not samples or all(isinstance(row.get(samples), list) for row in rows):
        return rows, numbers
    groups: dict[Any, tuple[Row, str]] = {}
    for row, number in zip(rows, numbers, strict=True):
        key = str(row.get(prompt)), str(row.get("prompt_id"))
        group, _ = groups.setdefault(key, ({**row, samples: [], judgement: []}, number))
        group[samples].append(row.get(samples))
        group[judgement].append(row.get(judgement))
    return [row for row, _ in groups.values()], [number for _, number in groups.values()]


def _judged(
    layout: PreferenceLayout, row: PreferenceRow, dimension: str, place: str, name: str
) -> JudgedRow | None:
    """Read a row by a layout. UserError, beginning with `place`, for cells of other kinds
    than the layout has."""
    try:
        judged = layout.read(row, dimension, place)
        return None if judged is None else _whole(judged, place)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise UserError(
            f"{place}: its cells are not of layout {name} ({reason}): correct or remove the row, "
            "or choose another --layout"
        ) from error


def _whole(judged: JudgedRow, place: str) -> JudgedRow:
    """A row whose judgement is of its samples. UserError for another number of them, and for a
    label or a rank that is no number of its kind."""
    way = "correct or remove the row"
    if not isinstance(judged.media, list | tuple):
        raise UserError(f"{place}: its samples are {reprlib.repr(judged.media)}, not a list: {way}")
    if judged.label is not None:
        preference_label(judged.label, place)
        if len(judged.media) != 2:
            raise UserError(
                f"{place}: a preference is of two samples, and it has {len(judged.media)}: {way}"
            )
    elif len(judged.ranks) != len(judged.media) or not all(map(math.isfinite, judged.ranks)):
        raise UserError(
            f"{place}: {len(judged.media)} samples have the ranks "
            f"{reprlib.repr(list(judged.ranks))}: each needs one number: {way}"
        )
    return judged


def _filled(rows: Sequence[Row]) -> list[Row]:
    """Rows with the same columns; a line may lack what others have."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{**dict.fromkeys(names), **row} for row in rows]


def load_preferences(source: Path, choice: ReadOptions) -> Preferences:
    """Read preferences from a file (jsonl, json, csv, tsv, parquet) or a folder of them.

    UserError: no such file or layout, a row without prompt, label or samples (with its number).
    """
    table, folder = table_of(source)
    images = choice.images or folder
    table = replace(table, rows=with_columns(_filled(table.rows), choice.columns, str(source)))
    answered = _answered(table, images, choice.layout, source.name)
    with_prompts = with_prompts_found(table, str(source))
    rows, numbers = with_prompts.rows, with_prompts.places
    columns = list(dict.fromkeys(key for row in rows[:50] for key in row))
    if choice.layout is not None and choice.layout not in LAYOUTS:
        raise UserError(
            f"--layout: {choice.layout!r} is not known; use one of {', '.join(LAYOUTS)}"
        )
    name = choice.layout or layout_of(columns, str(source), choice.columns)
    if name == "chosen" and answered:
        name = "texts" if choice.layout is None else name
    layout = LAYOUTS[name]
    dimension = choice.dimension or layout.dimension
    needed = (*layout.columns, *([dimension] if dimension else []))
    if lacking := [column for column in needed if column not in columns]:
        raise UserError(
            f"{source}: layout {name} needs {', '.join(lacking)}; the file has {', '.join(columns)}"
        )
    if name in ("plain", "plain_texts") and _PLACES.search(
        choice.columns.get(dimension, dimension)
    ):
        named = choice.columns.get(dimension, dimension)
        rows = _by_place(rows, numbers, dimension, named, source.name)
    prompt = PROMPT_COLUMN_OF.get(name, "prompt")
    rows, numbers = with_lists(rows, numbers, layout.samples, dimension, prompt)
    texts = list(dict.fromkeys(str(row.get(prompt)) for row in rows))
    wanted = set(texts)
    if choice.prompts is not None and choice.prompts < len(texts):
        rng = np.random.default_rng([choice.seed, len(texts)])
        wanted = {texts[i] for i in rng.permutation(len(texts))[: choice.prompts]}
    builder, unlabelled = _Builder(), 0
    for row, number in zip(rows, numbers, strict=True):
        if str(row.get(prompt)) not in wanted:
            continue
        place = f"{source.name}, {number}"
        judged = _judged(layout, row, dimension, place, name)
        if judged is None or len(judged.media) < 2:
            unlabelled += 1
        else:
            builder.add(judged, row, images, place)
    if not builder.pairs:
        raise UserError(f"{source}: no pair of samples has a label")
    return builder.finish(f"{folder.name}/{source.stem}".strip("/"), name, unlabelled)
