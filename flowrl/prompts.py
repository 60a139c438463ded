"""Prompt files: what to draw, in which order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.budget.rules import weighted_draw
from flowrl.errors import UserError
from flowrl.models.columns import resolved
from flowrl.paths import find
from samplers.noise import generator

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
