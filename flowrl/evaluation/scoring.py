"""`flowrl score`: a folder of images or videos, as a table of scores and contact sheets."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch.nn import functional

from flowrl.errors import UserError, terminal_text
from flowrl.evaluation.folders import SCORE_TABLES, SHEET, Where, columns, find_items
from flowrl.evaluation.measure import (
    Cost,
    Gallery,
    Item,
    check_labels,
    check_specs,
    loaded,
    parse_specs,
    scores,
    tested,
)
from flowrl.evaluation.outputs import make_output_folder
from flowrl.media import pictures
from flowrl.media.sounds import wave_image
from flowrl.paths import removed_on_error
from flowrl.settings.command_line.arguments import Word
from rewards import Reward
from rewards.audio import Audio
from rewards.perception.media import to_tensor

ScoreColumn = Float[np.ndarray, " n"]

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # begin a formula in a spreadsheet


@dataclass
class ScoreArguments:
    """Score a folder of images or videos: scores.csv, scores.parquet, contact sheets."""

    folder: Word[Path]
    """The folder; its subfolders are read too."""
    rewards: tuple[str, ...]
    """Names, or YAML such as '{name: shapes, kind: strict}'."""
    prompts: Path | None = None
    """A table with the columns file and prompt (rewards get all other columns); by default
    prompts.jsonl or metadata.jsonl in the folder."""
    prompts_from: Where = "auto"
    """table, captions (NAME.txt beside NAME.png), metadata (PNG text, EXIF) or names; auto tries
    them in this order."""
    sheet: int = 96
    """Number of images on a contact sheet: the best, the worst and some in between. 0: no
    sheets."""
    chunk: int = 16
    """Samples per call."""
    frames: int = 16
    """Frames of a video, evenly spaced."""
    out: Path | None = None
    """A folder; by default FOLDER/scores."""


def score_folder(arguments: ScoreArguments, objects: Mapping[str, Reward] = {}) -> Path:
    """Score the folder; returns the folder of the table. `objects` are additional rewards by label,
    passed from Python."""
    specs = parse_specs(arguments.rewards, "--rewards")
    if not specs and not objects:
        raise UserError("score: no rewards; name some with --rewards, such as shapes,brightness")
    if arguments.chunk < 1 or arguments.frames < 1 or arguments.sheet < 0:
        raise UserError("score: --chunk and --frames must be at least 1, and --sheet at least 0")
    check_specs(specs, "--rewards")
    check_labels(specs, objects)
    out = arguments.out or arguments.folder / "scores"
    inside = find_items(arguments.folder, arguments.prompts, arguments.prompts_from)
    items = inside.items
    make_output_folder(out)
    print(terminal_text(f"{len(items)} files, {items[-1].group + 1} prompts; {inside.origin}"))
    gallery = Gallery(items, arguments.frames)
    values: dict[str, ScoreColumn] = {}
    costs: dict[str, Cost] = {}

    def scored(name: str, reward: Reward) -> None:
        indices = range(len(items))
        values[name], costs[name] = scores(name, reward, gallery, indices, arguments.chunk)

    try:
        for name, spec in specs.items():
            scored(name, loaded(name, spec, items)[0])
        for name, reward in objects.items():
            scored(name, tested(name, reward, items))
    except UserError as error:
        if not values:
            raise
        write(out, items, values, gallery)
        done = f"the scores of {', '.join(values)} are in {out / 'scores.csv'}"
        raise UserError(f"{error}; {done}") from error
    write(out, items, values, gallery)
    for name in values if arguments.sheet else ():
        contact_sheet(
            out / f"{SHEET}{_file(name)}.png", gallery, name, values[name], arguments.sheet
        )
    print(terminal_text(summary(values, costs, gallery.abstained)))
    for reason in gallery.broken.values():
        print(terminal_text(f"not scored: {reason}"))
    for sentence in gallery.refusals():
        print(terminal_text(sentence))
    print(
        f"table: {out / 'scores.csv'}"
        + (f"  sheets: {out}/{SHEET}*.png" if arguments.sheet else "")
    )
    return out


def _file(name: str) -> str:
    return "".join(c if c.isalnum() or c in ".-_" else "_" for c in name)


def write(
    out: Path, items: Sequence[Item], values: dict[str, ScoreColumn], gallery: Gallery
) -> None:
    """Write scores.csv and scores.parquet: file, prompt, other columns, a column per reward (empty
    if unscored), and any problem with the file. A reward's column replaces a column of the same
    name."""
    import pyarrow
    from pyarrow import parquet

    table: dict[str, Any] = {
        "file": [item.source.name for item in items],
        "prompt": [item.prompt for item in items],
    }
    for column in columns(items):
        if column not in values:
            table[column] = [_cell(item.meta.get(column)) for item in items]
    for name, column in values.items():
        table[name] = [None if np.isnan(score) else float(score) for score in column]
    table["problem"] = [gallery.problem(item.source.name) for item in items]
    listed, whole = (out / name for name in SCORE_TABLES)
    with removed_on_error(listed), listed.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([_plain(name) for name in table])
        rows.writerows([_plain(cell) for cell in row] for row in zip(*table.values(), strict=True))
    with removed_on_error(whole):
        parquet.write_table(pyarrow.table(table), whole)


def _plain(cell: Any) -> Any:
    """A text, with a quotation mark before it if a spreadsheet would read it as a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in FORMULA and cell else cell


def _cell(value: Any) -> str | None:
    """The cell: text unchanged, other values as JSON, so that a column has one type."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


def contact_sheet(path: Path, gallery: Gallery, name: str, column: ScoreColumn, most: int) -> None:
    """Write a contact sheet, best first, of at most `most` samples: the first and last thirds show
    the two ends, and the rest is evenly spaced."""
    scored = np.flatnonzero(~np.isnan(column))
    rows = scored[np.argsort(-column[scored], kind="stable")]
    shown = rows[sheet_ranks(len(rows), most)].tolist()
    if not shown:
        return
    left_out = f", {len(shown)} of {len(rows)} shown" if len(shown) < len(rows) else ""
    title = f"{name}, best first{left_out}"
    stills = [thumbnail(_still(m)) for m in gallery.samples(shown).media]
    captions = [gallery.items[row].prompt for row in shown]
    page = pictures.contact_grid(stills, captions, [float(column[row]) for row in shown], title)
    pictures.save_grid(page, path)


def _still(media: Any) -> Any:
    """An image of a sample; of a sound its waveform."""
    if not isinstance(media, Audio):
        return pictures.still(media)
    return to_tensor(wave_image(media.waveform[0]))


def sheet_ranks(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    ends = most // 3
    middle = np.linspace(ends, count - ends - 1, most - 2 * ends).round().astype(int).tolist()
    return [*range(ends), *middle, *range(count - ends, count)]


def thumbnail(image: torch.Tensor) -> torch.Tensor:
    """Shrink the image to at most 256 pixels in height, so that sheets of large images fit in
    memory."""
    height, width = image.shape[1:]
    if height <= 256:
        return image
    size = (256, max(1, round(width * 256 / height)))
    return functional.interpolate(image[None], size, mode="bilinear", antialias=True)[0]


def summary(
    values: dict[str, ScoreColumn],
    costs: dict[str, Cost],
    abstained: Mapping[str, Sequence[str]] = {},
) -> str:
    """One line per reward: mean, spread and range of its scores, and its cost. Files to which it
    does not apply are not unscored."""
    head = (
        "reward",
        "mean",
        "spread",
        "lowest",
        "highest",
        "unscored",
        "ms per sample",
        "MB per sample",
    )
    rows: list[tuple[str, ...]] = [head]
    for name, column in values.items():
        scored = column[~np.isnan(column)]
        numbers = (scored.mean(), scored.std(), scored.min(), scored.max()) if len(scored) else ()
        cells = [f"{x:.4g}" for x in numbers] or ["-"] * 4
        missing = str(len(column) - len(scored) - len(abstained.get(name, ())))
        cost = costs[name]
        memory = "-" if cost.megabytes is None else f"{cost.megabytes:.1f}"
        rows.append((name, *cells, missing, f"{1000 * cost.seconds:.1f}", memory))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(["", *(line.rstrip() for line in lines), ""])
