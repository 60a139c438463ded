"""A folder of pictures and videos as items with prompts: from a table, from what the files say of
themselves, or from their names."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from PIL import Image

from flowrl.errors import UserError
from flowrl.evaluation.measure import Item
from flowrl.evaluation.sources import IMAGE_SUFFIXES, MEDIA_SUFFIXES, MOVING, Source
from flowrl.evaluation.tables import SUFFIXES, rows_of

Where = Literal["auto", "table", "metadata", "names"]

FILE_COLUMNS = ("file", "file_name", "image", "video", "path")
PROMPT_COLUMNS = ("prompt", "text", "caption")
TABLES = ("prompts", "metadata")  # names of tables that are found by themselves
DESCRIPTION, COMMENT = 0x010E, 0x9286  # EXIF


class FolderItems(NamedTuple):
    items: list[Item]
    told: str  # where the prompts came from, for the terminal


def find_items(folder: Path, table: Path | None, where: Where) -> FolderItems:
    """Every picture and video below `folder`, those of one prompt together.

    auto takes a table if there is one (`prompts.jsonl`, `metadata.jsonl` or csv), else what the
    files say of themselves, else their names. UserError: no folder, no pictures, a table that lacks
    its columns, a file without a prompt where one was asked for.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    table = table or _own_table(folder) if where in ("auto", "table") else None
    if where == "table" and table is None:
        raise UserError(f"{folder} has no prompts.jsonl; name a table with --prompts FILE")
    if table is not None:
        rows = _from_table(folder, table)
        told = f"prompts from {table}"
    else:
        files = sorted(
            p for p in folder.rglob("*") if p.suffix.lower() in MEDIA_SUFFIXES and p.is_file()
        )
        rows = [(path, *_of_file(path, where), {}) for path in files]
        told = "prompts from " + ", ".join(
            f"{name} ({count})" for name, count in Counter(row[2] for row in rows).items()
        )
        rows = [(path, prompt, meta) for path, prompt, _, meta in rows]
    if not rows:
        raise UserError(f"{folder} has no pictures or videos ({', '.join(sorted(MEDIA_SUFFIXES))})")
    group = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompt for _, prompt, _ in rows))}
    items = [
        Item(Source(_name(path, folder), path), prompt, group[prompt], meta)
        for path, prompt, meta in rows
    ]
    return FolderItems(sorted(items, key=lambda item: item.group), told)


def _name(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _own_table(folder: Path) -> Path | None:
    names = [folder / f"{stem}{suffix}" for stem in TABLES for suffix in SUFFIXES]
    return next((path for path in names if path.is_file()), None)


def _from_table(folder: Path, table: Path) -> list[tuple[Path, str, Mapping[str, Any]]]:
    rows, _ = rows_of(table)
    file, prompt = (
        next((c for c in names if c in rows[0]), None) for names in (FILE_COLUMNS, PROMPT_COLUMNS)
    )
    if file is None or prompt is None:
        raise UserError(
            f"{table}: a column of files ({', '.join(FILE_COLUMNS)}) and one of prompts "
            f"({', '.join(PROMPT_COLUMNS)}) wanted; there are {', '.join(rows[0])}"
        )
    found = []
    for i, row in enumerate(rows):
        if not all(isinstance(row.get(column), str) and row[column] for column in (file, prompt)):
            raise UserError(f"{table}, row {i + 1}: {file} or {prompt} is empty")
        rest = {key: value for key, value in row.items() if key not in (file, prompt)}
        found.append((folder / row[file], row[prompt], rest))
    return found


def _of_file(path: Path, where: Where) -> tuple[str, str]:
    """Its prompt, and where it was read."""
    said = written(path) if where != "names" else None
    if said is not None:
        return said, "the files' metadata"
    if where == "metadata":
        raise UserError(f"{path} says no prompt in its metadata; try --prompts-from names")
    return named(path), "file names"


def named(path: Path) -> str:
    """`a_red_circle_0003.png` is "a red circle"; a name of digits alone is the folder's name."""
    words = re.sub(r"[_\s]+", " ", path.stem).strip()
    words = re.sub(r"[ -]?\(?\d+\)?$", "", words).strip(" -")
    return words or re.sub(r"[_\s]+", " ", path.parent.name).strip() or path.stem


def written(path: Path) -> str | None:
    """The prompt that a picture carries: in a PNG's text `prompt` (plain, or ComfyUI's graph),
    `parameters` (AUTOMATIC1111: the text before the negative prompt), `Description`; or in EXIF."""
    if path.suffix.lower() not in IMAGE_SUFFIXES | MOVING:
        return None
    try:
        with Image.open(path) as image:
            text = {k: v for k, v in image.info.items() if isinstance(v, str)}
            exif = image.getexif()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None  # it is named when it is scored
    if parameters := text.get("parameters"):
        return re.split(r"\n(?:Negative prompt|Steps):", parameters)[0].strip() or None
    if prompt := text.get("prompt"):
        return _of_graph(prompt) if prompt.lstrip().startswith("{") else prompt.strip()
    for said in (text.get("Description"), exif.get(DESCRIPTION)):
        if isinstance(said, str) and said.strip():
            return said.strip()
    return None


def _of_graph(text: str) -> str | None:
    """ComfyUI stores its graph of nodes: the text of what a sampler's `positive` is wired to."""
    try:
        nodes = json.loads(text)
    except json.JSONDecodeError:
        return None
    inputs = {k: n.get("inputs", {}) for k, n in nodes.items() if isinstance(n, dict)}
    for node in inputs.values():
        link = node.get("positive")
        for _ in range(8):  # through nodes that pass conditioning on
            if not isinstance(link, list) or str(link[0]) not in inputs:
                break
            source = inputs[str(link[0])]
            if isinstance(source.get("text"), str):
                return source["text"].strip() or None
            link = source.get("conditioning") or source.get("positive") or source.get("text")
    return None


def columns(items: Sequence[Item]) -> list[str]:
    """The further columns of a table, in order."""
    return list(dict.fromkeys(key for item in items for key in item.meta))
