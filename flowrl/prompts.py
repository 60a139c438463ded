"""Prompt files: what to draw, in which order."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import UserError
from flowrl.paths import find
from samplers.noise import generator

IMAGE_COLUMNS = re.compile(
    r"(.+_)?(images?|videos?)|conditioning_frames|image_reference|(control_)?mask"
)  # columns that hold images or videos
READERS = {".jsonl": "json", ".json": "json", ".txt": "text", ".csv": "csv", ".parquet": "parquet"}


class Draws(NamedTuple):
    """Ids, unique in the run, and the prompts' rows in the file. `merged` counts the draws of each
    group that is compared, in order: usually a draw is a group."""

    ids: tuple[int, ...]
    rows: tuple[int, ...]
    merged: tuple[int, ...]

    @classmethod
    def each(cls, ids: Sequence[int], rows: Sequence[int]) -> "Draws":
        """A group each."""
        return cls(tuple(ids), tuple(rows), (1,) * len(ids))


@dataclass(frozen=True)
class PromptSet:
    texts: tuple[str, ...]
    meta: tuple[Mapping[str, Any], ...]  # all columns, a row each, for rewards

    @classmethod
    def read(cls, source: str, column: str, place: str) -> "PromptSet":
        """Read a file (jsonl, json, txt, csv, parquet), a folder or a hub name with `datasets`.

        Errors: a missing file, a missing column, no rows, an empty prompt (with its row, from 1).
        """
        rows = _rows(source, place)
        column = "text" if source.endswith(".txt") and column == "prompt" else column
        if not rows:
            raise UserError(f"{place}: {source} has no prompts")
        if column not in rows[0]:
            found = ", ".join(rows[0])
            raise UserError(f"{place}: {source} has no column {column!r}; it has {found}")
        for i, row in enumerate(rows):
            text = row[column]
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"{place}: {source}, row {i + 1}: the prompt is empty")
        folder = find(source).parent  # image columns are relative to the file
        meta = tuple(resolved(row, folder) for row in rows)
        return cls(tuple(row[column] for row in rows), meta)

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> tuple[list[str], list[Mapping[str, Any]]]:
        """Texts and columns of some rows."""
        return [self.texts[row] for row in rows], [self.meta[row] for row in rows]

    def draw(self, iteration: int, count: int, seed: int, weights: Tensor | None = None) -> Draws:
        """The `count` draws of an iteration: every prompt once before any comes again, or different
        ones in proportion to `weights` [prompts].

        A pure function of its arguments: a resumed run draws what the unbroken one would have.
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


def _rows(source: str, place: str) -> list[dict[str, Any]]:
    from datasets import disable_progress_bars, load_dataset  # slow to import
    from datasets.exceptions import DatasetGenerationError

    disable_progress_bars()
    path = find(source)
    if path.is_file():
        if path.stat().st_size == 0:
            raise UserError(f"{place}: {source} has no prompts")
        if path.suffix not in READERS:
            known = ", ".join(READERS)
            raise UserError(f"{place}: {source}: cannot read {path.suffix}; one of {known}")
        # its cache knows a file by its time alone, and two runs may start at once: none is kept
        try:
            with TemporaryDirectory() as cache:
                kind, files = READERS[path.suffix], str(path)
                rows = load_dataset(kind, data_files=files, split="train", cache_dir=cache)
                return rows.to_list()
        except DatasetGenerationError as error:
            why = error.__cause__ or error
            raise UserError(f"{place}: {source} is not readable: {why}") from error
    if path.is_dir():
        with TemporaryDirectory() as cache:
            return load_dataset(str(path), split="train", cache_dir=cache).to_list()
    if Path(source).suffix or source.count("/") != 1:
        raise UserError(f"{place}: no such file: {source}")
    return load_dataset(source, split="train").to_list()


def resolved(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A row of a prompt file with its image paths, where they are relative to it, made whole."""
    return {
        name: _whole(value, folder) if IMAGE_COLUMNS.fullmatch(name) else value
        for name, value in row.items()
    }


def _whole(value: Any, folder: Path) -> Any:
    if isinstance(value, list | tuple):
        return [_whole(one, folder) for one in value]
    if isinstance(value, str) and value and (folder / value).is_file():
        return str(folder / value)
    return value


def uncertainty(
    rates: Float[Tensor, " g"], visits: Float[Tensor, " g"], fade: float = 0.0, floor: float = 0.05
) -> Float[Tensor, " g"]:
    """Weights of prompts, sqrt(p (1 - p)) / visits^fade + floor: those that could go either way
    come more often, and none never (single-stream, arXiv:2509.13232)."""
    spread = (rates * (1 - rates)).clamp(min=0).sqrt()
    return spread / visits.clamp(min=1) ** fade + floor


def weighted_draw(weights: Float[Tensor, " g"], count: int, key: Sequence[int | str]) -> list[int]:
    """`count` different prompts, drawn one after the other in proportion to their weights.

    Noise is keyed, so a resumed run draws the same.
    """
    positive = int((weights > 0).sum())
    if count > positive:
        raise UserError(f"{count} prompts are wanted, and {positive} have a weight above 0")
    uniform = torch.rand(len(weights), generator=generator(*key), dtype=torch.float64)
    return (weights.double().log() - (-uniform.log()).log()).topk(count).indices.tolist()
