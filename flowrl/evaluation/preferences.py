"""Preference data sets: human verdicts on pairs or rankings of samples, in several layouts.

plain        prompt, a, b, label: 1 or "a" (a is better), 0 or "b", 0.5 or "tie"
chosen       prompt, chosen, rejected: the first is better
pickapic     caption, jpg_0, jpg_1, label_0; Pick-a-Pic, arXiv:2305.01569
imagereward  prompt, generations, ranking; ImageReward's test set, arXiv:2304.05977
hpdv2        prompt, image_path, rank; HPDv2's test set, arXiv:2306.09341
hpdv2_pairs  prompt, file_path, human_preference; HPDv2's training set
genai        left_output_image, right_output_image, vote_type; GenAI-Bench, arXiv:2406.04485
genai_video  left_video, right_video, vote_type
videogen     prompt, path_A, path_B, and a column of A, B, same; VideoGen-RewardBench, 2501.13918
HPDv3 and data sets of edits: `flowrl.evaluation.edit_preferences`

The columns determine the layout. A row may have a `category`; rewards get all other columns
unchanged. Rank 1 is the best; equal ranks are ties.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from flowrl.errors import UserError
from flowrl.evaluation.edit_preferences import EDIT_LAYOUTS, with_more
from flowrl.evaluation.measure import Item
from flowrl.evaluation.preference_rows import JudgedRow, PreferenceLayout, PreferenceRow
from flowrl.evaluation.sources import Source
from flowrl.evaluation.tables import rows_of
from flowrl.prompts.prompt_set import PromptRow

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
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value <= 1:
        raise UserError(
            f"{place}: the label is {cell!r}, but must be a, b, tie or a number in 0..1"
        )
    return value


def _plain(row: PreferenceRow, dimension: str, place: str) -> JudgedRow:
    return JudgedRow(row["prompt"], (row["a"], row["b"]), preference_label(row[dimension], place))


def _chosen(row: PreferenceRow, _dimension: str, _place: str) -> JudgedRow:
    return JudgedRow(row["prompt"], (row["chosen"], row["rejected"]), 1.0)


def _pickapic(row: PreferenceRow, dimension: str, place: str) -> JudgedRow | None:
    if row.get("has_label") is False:
        return None
    return JudgedRow(
        row["caption"], (row["jpg_0"], row["jpg_1"]), preference_label(row[dimension], place)
    )


def _ranked(media: str, ranks: str) -> Callable[[PreferenceRow, str, str], JudgedRow | None]:
    def read(row: PreferenceRow, _dimension: str, place: str) -> JudgedRow | None:
        given = row[ranks]
        if not isinstance(given, list) or len(given) != len(row[media]):
            raise UserError(f"{place}: {ranks} and {media} must be two lists of equal length")
        return JudgedRow(row["prompt"], row[media], ranks=[float(rank) for rank in given])

    return read


def _hpdv2_pairs(row: PreferenceRow, _dimension: str, _place: str) -> JudgedRow | None:
    first, second = row["human_preference"]
    return JudgedRow(row["prompt"], row["file_path"], (1 + first - second) / 2)


def _sides(left: str, right: str) -> Callable[[PreferenceRow, str, str], JudgedRow | None]:
    def read(row: PreferenceRow, dimension: str, place: str) -> JudgedRow | None:
        prompt = row.get("prompt") or row.get("instruct_prompt")
        label = preference_label(row[dimension], place)
        more = {"source": row["source_image"]} if row.get("source_image") else {}
        return JudgedRow(prompt, (row[left], row[right]), label, more=more)

    return read


LAYOUTS = {
    "pickapic": PreferenceLayout(("caption", "jpg_0", "jpg_1", "label_0"), _pickapic, "label_0"),
    "imagereward": PreferenceLayout(
        ("prompt", "generations", "ranking"), _ranked("generations", "ranking")
    ),
    "hpdv2": PreferenceLayout(("prompt", "image_path", "rank"), _ranked("image_path", "rank")),
    "hpdv2_pairs": PreferenceLayout(("prompt", "file_path", "human_preference"), _hpdv2_pairs),
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
    "chosen": PreferenceLayout(("prompt", "chosen", "rejected"), _chosen),
    **EDIT_LAYOUTS,
}

PROMPT_COLUMN_OF = {  # the others: prompt
    "pickapic": "caption",
    "editscore_bench": "instruction",
    "editreward_bench": "instruction",
}


@dataclass(frozen=True)
class Preferences:
    """n samples of c prompts, contiguous by group, and p pairs of them."""

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
    pairs: list[tuple[int, int, float, str, int]] = field(default_factory=list)
    ranks: list[float] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)

    def add(self, judged: JudgedRow, row: PreferenceRow, folder: Path, place: str) -> None:
        if not isinstance(judged.prompt, str) or not judged.prompt.strip():
            raise UserError(f"{place}: the prompt is empty")
        row = with_more(row, judged, folder, place)
        sources = [Source.of(m, folder, f"{place}, {i + 1}") for i, m in enumerate(judged.media)]
        number = self.prompts.setdefault(judged.prompt, len(self.prompts))
        group = len(self.ranks) if judged.ranks else number
        meta = PromptRow({k: v for k, v in row.items() if not isinstance(v, bytes)}, place)
        rows = []
        for i, source in enumerate(sources):
            self.items.append(Item(source, judged.prompt, group, meta))
            rows.append(len(self.items) - 1)
            if judged.ranks:
                self.ranks.append(judged.ranks[i])
        category = str(row.get("category") or "")
        for i, j in combinations(range(len(rows)), 2):
            gap = judged.ranks[j] - judged.ranks[i] if judged.ranks else 0.0
            label = judged.label if judged.label is not None else (1 + np.sign(gap)) / 2
            self.pairs.append((rows[i], rows[j], float(label), category, number))

    def finish(self, name: str, layout: str, unlabelled: int) -> Preferences:
        """Build the data set, with contiguous groups and each sample once."""
        keys = [
            (item.group, item.source.name if item.source.data is None else item.source.data)
            for item in self.items
        ]
        if self.ranks:
            keys = [(item.group, i) for i, item in enumerate(self.items)]
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        kept = sorted(first.values(), key=lambda i: (self.items[i].group, i))
        groups = {g: i for i, g in enumerate(dict.fromkeys(self.items[i].group for i in kept))}
        at = {i: place for place, i in enumerate(kept)}
        a, b, label, category, cluster = zip(*self.pairs, strict=True)
        return Preferences(
            name=name,
            layout=layout,
            items=tuple(self.items[i]._replace(group=groups[self.items[i].group]) for i in kept),
            a=np.array([at[first[keys[i]]] for i in a]),
            b=np.array([at[first[keys[i]]] for i in b]),
            label=np.array(label),
            category=tuple(category),
            cluster=np.array(cluster),
            rank=np.array(self.ranks)[kept] if self.ranks else None,
            unlabelled=unlabelled,
        )


def layout_of(columns: Sequence[str], place: str) -> str:
    for name, layout in LAYOUTS.items():
        if set(layout.columns) <= set(columns):
            return name
    wanted = "; ".join(f"{name}: {', '.join(layout.columns)}" for name, layout in LAYOUTS.items())
    raise UserError(f"{place}: the columns {', '.join(columns)} match no known layout ({wanted})")


@dataclass(frozen=True)
class ReadOptions:
    """The part of a data set to read, and how to read it."""

    layout: str | None = None  # by the columns if None
    dimension: str | None = None  # the column of labels; the layout's own if None
    images: Path | None = None  # the folder of relative paths; the file's folder if None
    prompts: int | None = None  # at most so many, drawn by the seed
    seed: int = 0


def load_preferences(source: Path, choice: ReadOptions) -> Preferences:
    """Read preferences from a file (jsonl, json, csv, tsv, parquet) or a folder of them.

    UserError: no such file or layout, a row without prompt, label or samples (with its number).
    """
    rows, folder = rows_of(source)
    columns = list(dict.fromkeys(key for row in rows[:50] for key in row))
    if choice.layout is not None and choice.layout not in LAYOUTS:
        raise UserError(
            f"--layout: {choice.layout!r} is not known; use one of {', '.join(LAYOUTS)}"
        )
    name = choice.layout or layout_of(columns, str(source))
    layout = LAYOUTS[name]
    dimension = choice.dimension or layout.dimension
    needed = (*layout.columns, *([dimension] if dimension else []))
    if lacking := [column for column in needed if column not in columns]:
        raise UserError(
            f"{source}: layout {name} needs {', '.join(lacking)}; the file has {', '.join(columns)}"
        )
    prompt = PROMPT_COLUMN_OF.get(name, "prompt")
    texts = list(dict.fromkeys(str(row.get(prompt)) for row in rows))
    wanted = set(texts)
    if choice.prompts is not None and choice.prompts < len(texts):
        rng = np.random.default_rng([choice.seed, len(texts)])
        wanted = {texts[i] for i in rng.permutation(len(texts))[: choice.prompts]}
    builder, unlabelled = _Builder(), 0
    for i, row in enumerate(rows):
        if str(row.get(prompt)) not in wanted:
            continue
        place = f"{source.name}, row {i + 1}"
        judged = layout.read(row, dimension, place)
        if judged is None or len(judged.media) < 2:
            unlabelled += 1
        else:
            builder.add(judged, row, choice.images or folder, place)
    if not builder.pairs:
        raise UserError(f"{source}: no pair of samples has a label")
    return builder.finish(f"{folder.name}/{source.stem}".strip("/"), name, unlabelled)
