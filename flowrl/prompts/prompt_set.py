"""A set of prompts, and the draws of each iteration."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import UserError
from flowrl.paths import find
from flowrl.prompts.files import PromptRows, read_rows
from samplers.noise import generator

IMAGE_COLUMNS = re.compile(
    r"(.+_)?(images?|videos?)|conditioning_frames|image_reference|(control_)?mask"
)  # columns that hold images or videos
_MOST_CHARACTERS = 100_000  # of a prompt


class Draws(NamedTuple):
    """Ids, unique in the run, and the prompts' rows in the file. `merged` has the number of draws
    in each group of compared samples, in order: usually one."""

    ids: tuple[int, ...]
    rows: tuple[int, ...]
    merged: tuple[int, ...]

    @classmethod
    def each(cls, ids: Sequence[int], rows: Sequence[int]) -> "Draws":
        """Draws that are one group each."""
        return cls(tuple(ids), tuple(rows), (1,) * len(ids))


class PromptRow(dict[str, Any]):
    """All columns of one prompt. `place` names its file and line in messages."""

    def __init__(self, columns: Mapping[str, Any], place: str) -> None:
        super().__init__(columns)
        self.place = place


@dataclass(frozen=True)
class PromptSet:
    """Prompts with all columns of their rows, which rewards receive as `meta`."""

    texts: tuple[str, ...]
    meta: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, source: str, column: str, place: str) -> "PromptSet":
        """Read a file (jsonl, json, txt, csv, parquet), a folder or a data set of the hub.

        UserErrors begin with `place`: a missing or damaged file, a missing column, no rows, or a
        prompt that is no text, with its line (or row, from 1).
        """
        table = read_rows(source, place)
        rows = table.rows
        column = "text" if source.endswith(".txt") and column == "prompt" else column
        if not rows:
            raise UserError(f"{place}: {source} has no prompts")
        if column not in rows[0]:
            names = ", ".join(name[:50] for name in list(rows[0])[:20]) or "no columns"
            raise UserError(f"{place}: {source} has no column {column!r}; it has {names}")
        _check_prompts(table, column, f"{place}: {source}")
        folder = find(source).parent  # image columns are relative to the file
        places = (f"{place}: {source}, {at}" for at in table.places)
        pairs = zip(rows, places, strict=True)
        meta = tuple(PromptRow(resolved(row, folder), at) for row, at in pairs)
        return cls(tuple(row[column] for row in rows), meta)

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> tuple[list[str], list[Mapping[str, Any]]]:
        """Texts and columns of some rows."""
        return [self.texts[row] for row in rows], [self.meta[row] for row in rows]

    def draw(self, iteration: int, count: int, seed: int, weights: Tensor | None = None) -> Draws:
        """The `count` draws of an iteration: every prompt once before any repeats, or distinct
        prompts in proportion to `weights` [prompts].

        A pure function of its arguments, so that a resumed run draws the same prompts.
        """
        ids = range(iteration * count, (iteration + 1) * count)
        if weights is not None:
            key = (seed, "prompts", iteration)
            return Draws.each(ids, weighted_draw(weights, count, key))
        orders: dict[int, list[int]] = {}
        for epoch in {i // len(self) for i in ids}:
            rng = generator(seed, "prompts", epoch)
            orders[epoch] = torch.randperm(len(self), generator=rng).tolist()
        return Draws.each(ids, [orders[i // len(self)][i % len(self)] for i in ids])


def _check_prompts(table: PromptRows, column: str, source: str) -> None:
    """UserError for the first prompt that is no text."""
    for row, at in zip(table.rows, table.places, strict=True):
        text = row[column]
        if isinstance(text, list):
            raise UserError(
                f"{source}, {at}: the prompt is a list of chat messages, and a prompt is one text: "
                "keep the user's message, and put a system message into model.system"
            )
        if text is not None and not isinstance(text, str):
            raise UserError(f"{source}, {at}: the prompt is {text!r:.50}, and not a text")
        if text is None or not text.strip():
            raise UserError(f"{source}, {at}: the prompt is empty")
        if len(text) > _MOST_CHARACTERS:
            raise UserError(f"{source}, {at}: the prompt has more than {_MOST_CHARACTERS} letters")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise UserError(
                f"{source}, {at}: the prompt has half a surrogate pair, which is no text"
            )


def resolved(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The row of a prompt file, its image paths relative to `folder` turned into whole paths."""
    return {
        name: _whole(value, folder) if IMAGE_COLUMNS.fullmatch(name) else value
        for name, value in row.items()
    }


def _whole(value: Any, folder: Path, levels: int = 2) -> Any:
    if isinstance(value, list | tuple) and levels:
        return [_whole(one, folder, levels - 1) for one in value]
    if isinstance(value, str) and value and _is_file(folder / value):
        return str(folder / value)
    return value


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with characters that no name has
        return False


def uncertainty(
    rates: Float[Tensor, " g"], visits: Float[Tensor, " g"], fade: float = 0.0, floor: float = 0.05
) -> Float[Tensor, " g"]:
    """Weights of prompts, sqrt(p (1 - p)) / visits^fade + floor: largest at a success rate of 1/2,
    and never 0 (single-stream, arXiv:2509.13232)."""
    spread = (rates * (1 - rates)).clamp(min=0).sqrt()
    return spread / visits.clamp(min=1) ** fade + floor


def weighted_draw(weights: Float[Tensor, " g"], count: int, key: Sequence[int | str]) -> list[int]:
    """`count` distinct prompts, drawn without replacement in proportion to their weights.

    The noise is keyed, so a resumed run draws the same prompts.
    """
    positive = int((weights > 0).sum())
    if count > positive:
        raise UserError(f"{count} prompts are needed, but only {positive} have a weight above 0")
    uniform = torch.rand(len(weights), generator=generator(*key), dtype=torch.float64)
    return (weights.double().log() - (-uniform.log()).log()).topk(count).indices.tolist()
