"""A folder of images and videos as items with prompts: from a table, from the metadata of the
files, or from their names."""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flowrl.bounded_files import bounded_bytes, json_object
from flowrl.errors import UserError
from flowrl.evaluation.measure import Item
from flowrl.evaluation.sources import IMAGE_SUFFIXES, MEDIA_SUFFIXES, MOVING, Source
from flowrl.evaluation.tables import SUFFIXES, table_of
from flowrl.prompts.files import EVENTS, VOTED_SAMPLES, folders_of_votes, utf8_text
from rewards.perception.contents import file_unlike_its_name, open_plain
from rewards.perception.files import DAMAGE, opened_image_file
from rewards.perception.moving import MEDIA_FORMATS

Where = Literal["auto", "table", "captions", "metadata", "names"]

FILE_COLUMNS = ("file", "file_name", "image", "video", "path")
EDITED = "source_image"  # the column with the image that was edited
PROMPT_COLUMNS = ("prompt", "text", "caption")
TABLES = ("prompts", "metadata")  # names of tables that need no option
MOST_CAPTION = 2**20  # bytes
CAPTIONS = (".txt", ".caption")  # of files beside the images, as trainers of LoRAs read them
DESCRIPTION = 0x010E  # of EXIF


SCORE_TABLES = ("scores.csv", "scores.parquet")  # which `flowrl score` writes beside its sheets
SHEET = "sheet_"  # begins the name of a contact sheet
GRID, SPECTROGRAM = "grid", ".spectrogram.png"  # pages of `flowrl sample` beside its samples


class FolderItems(NamedTuple):
    items: list[Item]
    origin: str  # of the prompts, for the terminal


def _check_asked(folder: Path, table: Path | None, where: Where) -> None:
    """UserError for no folder, one of votes, and a table that would not be read."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    votes = folder.parent if _is_of_votes(folder) else folder
    if (votes / EVENTS).is_file():
        of = "is" if votes == folder else "is part of"
        raise UserError(
            f"{folder} {of} a folder of votes, and its files have no prompts: `flowrl "
            f"evaluate-rewards {votes}` scores its samples"
        )
    if table is not None and where not in ("auto", "table"):
        raise UserError(
            f"--prompts names the table {table}, and --prompts-from {where} reads none: leave one "
            "of them out"
        )


def find_items(folder: Path, table: Path | None, where: Where) -> FolderItems:
    """All images and videos below `folder`, grouped by prompt.

    auto uses a table if there is one (`prompts.jsonl`, `metadata.jsonl` or csv), otherwise for each
    file its caption (`NAME.txt` or `NAME.caption` beside it), its metadata, or its name. Contact
    sheets that `flowrl score` left there are no samples. UserError:
    no folder, no images, a table without the required columns, a caption that is not UTF-8, a file
    without a caption or metadata if `where` requires it.

    The folder may be another person's: a table that it brings along names files inside it alone,
    and captions are no links that lead out of it. A table that the user names may name any file.
    """
    _check_asked(folder, table, where)
    named, table = table, table or _own_table(folder) if where in ("auto", "table") else None
    if where == "table" and table is None:
        raise UserError(f"{folder} has no prompts.jsonl; give a table with --prompts FILE")
    if table is not None:
        rows = _from_table(folder, table)
        edited = [meta["source"] for _, _, meta in rows if meta.get(EDITED)]
        originals = [Path(source.partition("#")[0]) for source in edited]
        if named is None:
            for path, _, _ in rows:
                _check_inside(folder, path, table)
            for original in originals:
                _check_inside(folder, original, table)
        listed = [*(path for path, _, _ in rows), *originals]
        origin = f"prompts from {table}{_unnamed(folder, listed)}"
    else:
        files = _media_of(folder)
        rows = [(path, *_of_file(path, where, folder), {}) for path in files]
        origin = "prompts from " + ", ".join(
            f"{name} ({count})" for name, count in Counter(row[2] for row in rows).items()
        )
        rows = [(path, prompt, meta) for path, prompt, _, meta in rows]
    if not rows and (votes_there := folders_of_votes(folder)):
        raise UserError(
            f"{folder} has no images or videos but those of votes: `flowrl evaluate-rewards "
            f"{votes_there[-1]}` scores them"
        )
    if not rows:
        raise UserError(f"{folder} has no images or videos ({', '.join(sorted(MEDIA_SUFFIXES))})")
    for path, _, _ in rows:
        if not _is_text(str(path)):
            raise UserError(f"{str(path)!r}: the name of this file is not UTF-8: rename it")
    group = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompt for _, prompt, _ in rows))}
    items = [
        Item(Source(_name(path, folder), path), prompt, group[prompt], meta)
        for path, prompt, meta in rows
    ]
    return FolderItems(sorted(items, key=lambda item: item.group), origin)


def _unnamed(folder: Path, named: Sequence[Path]) -> str:
    """A clause on the files of a folder that its table does not name, which are left out; empty if
    it names all but the pages that flowrl draws beside samples."""
    listed = {os.path.abspath(path) for path in named}
    unnamed = [
        path
        for path in _media_of(folder)
        if os.path.abspath(path) not in listed
        and path.stem != GRID
        and not path.name.endswith(SPECTROGRAM)
    ]
    if not unnamed:
        return ""
    return (
        f", which does not name {len(unnamed)} of the images and videos there, such as "
        f"{_name(unnamed[0], folder)}: they are left out"
    )


def _media_of(folder: Path) -> list[Path]:
    """The images and videos below a folder, but for the contact sheets of `flowrl score` and the
    copies in folders of votes: what an earlier call has left is no sample."""
    names = (p for p in folder.rglob("*") if p.suffix.lower() in MEDIA_SUFFIXES and _is_there(p))
    return sorted(path for path in names if not _is_sheet(path) and not _is_of_votes(path.parent))


def _is_of_votes(folder: Path) -> bool:
    """Whether it has the copies of samples that a folder of votes shows."""
    return folder.name == VOTED_SAMPLES and (folder.parent / EVENTS).is_file()


def _is_sheet(path: Path) -> bool:
    named = path.name.startswith(SHEET) and path.suffix == ".png"
    return named and all((path.parent / table).is_file() for table in SCORE_TABLES)


def _is_there(path: Path) -> bool:
    """Whether a name stands for a file; a link to nowhere does, so that it is counted among the
    files that cannot be read."""
    return path.is_file() or (path.is_symlink() and not path.exists())


def _is_text(name: str) -> bool:
    """Whether a name can be written into a table; bytes that are not UTF-8 are surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _name(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def _own_table(folder: Path) -> Path | None:
    names = [folder / f"{stem}{suffix}" for stem in TABLES for suffix in SUFFIXES]
    return next((path for path in names if path.is_file()), None)


def _from_table(folder: Path, table: Path) -> list[tuple[Path, str, Mapping[str, Any]]]:
    listing, _ = table_of(table)
    columns = listing.rows[0]
    file, prompt = (
        next((c for c in names if c in columns), None) for names in (FILE_COLUMNS, PROMPT_COLUMNS)
    )
    if file is None or prompt is None:
        raise UserError(
            f"{table}: expected a column with files ({', '.join(FILE_COLUMNS)}) and one with "
            f"prompts ({', '.join(PROMPT_COLUMNS)}), but found {', '.join(columns)}"
        )
    paths = []
    for row, at in zip(listing.rows, listing.places, strict=True):
        if not all(isinstance(row.get(column), str) and row[column] for column in (file, prompt)):
            raise UserError(f"{table}, {at}: {file} or {prompt} is empty")
        meta = {key: value for key, value in row.items() if key not in (file, prompt)}
        if row.get(EDITED):
            meta["source"] = _edited(folder, row[EDITED], f"{table}, {at}")
        paths.append((folder / row[file], row[prompt], meta))
    return paths


def _edited(folder: Path, cell: Any, place: str) -> str:
    """The path of an image that was edited, as edit rewards and `flowrl vote` read it."""
    if not isinstance(cell, str):
        raise UserError(f"{place}: {EDITED} must name a file of the folder, not {cell!r:.50}")
    return str(folder / cell)


def _check_inside(folder: Path, path: Path, table: Path) -> None:
    """UserError for a file outside the folder, as the table writes its name: a link in the folder
    stands for its file."""
    if not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder)):
        raise UserError(
            f"{table} names {path}, which is outside the folder that brought the table along: "
            f"remove that row, or name the table yourself: --prompts {table}"
        )


def _of_file(path: Path, where: Where, folder: Path) -> tuple[str, str]:
    """The prompt of a file, and its origin."""
    prompt = caption_beside(path, folder) if where in ("auto", "captions") else None
    if prompt is not None:
        return prompt, "captions beside the files"
    if where == "captions":
        raise UserError(f"{path} has no caption beside it, such as {path.stem}.txt")
    prompt = embedded_prompt(path) if where != "names" else None
    if prompt is not None:
        return prompt, "the files' metadata"
    if where == "metadata":
        raise UserError(f"{path} has no prompt in its metadata; try --prompts-from names")
    return prompt_of_name(path), "file names"


def caption_beside(path: Path, folder: Path) -> str | None:
    """The text of `NAME.txt` or `NAME.caption` beside `NAME.png`, its lines joined; None without
    one, and for a file without a word, such as the boxes of a detector.

    Of AUTOMATIC1111's text, it is the part before the negative prompt. UserError, with the line,
    for a file that is not UTF-8, and for a link that leads out of the folder: its text would stand
    in tables and go to servers of rewards."""
    for suffix in CAPTIONS:
        file = path.with_suffix(suffix)
        if not file.is_file():
            continue
        if not file.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{file} leads out of {folder}: put the caption's own file in the place of the "
                "link, or use --prompts-from names"
            )
        try:
            wrong = file_unlike_its_name(file)
            text = utf8_text(bounded_bytes(file, MOST_CAPTION)) if wrong is None else ""
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read: {error}") from error
        if wrong is not None:
            raise UserError(f"{file} cannot be read: it {wrong}")
        words = " ".join(_before_settings(text).split())
        if any(letter.isalpha() for letter in words):
            return words
    return None


def _before_settings(text: str) -> str:
    """AUTOMATIC1111's text without its negative prompt and settings; other texts unchanged."""
    return re.split(r"\n(?:Negative prompt|Steps):", text)[0]


def prompt_of_name(path: Path) -> str:
    """The prompt in a file's name: `a_red_circle_0003.png` is "a red circle".

    A name with only digits is replaced by the folder's name.
    """
    words = re.sub(r"[_\s]+", " ", path.stem).strip()
    words = re.sub(r"[ -]?\(?\d+\)?$", "", words).strip(" -")
    return words or re.sub(r"[_\s]+", " ", path.parent.name).strip() or path.stem


def embedded_prompt(path: Path) -> str | None:
    """The prompt in an image's metadata: the text entries `prompt` (plain, or ComfyUI's graph),
    `parameters` (AUTOMATIC1111: the text before the negative prompt) or `Description` of a PNG, or
    EXIF."""
    if path.suffix.lower() not in IMAGE_SUFFIXES | MOVING:
        return None
    try:
        with open_plain(path) as file, opened_image_file(file, formats=MEDIA_FORMATS) as image:
            text = {k: v for k, v in image.info.items() if isinstance(v, str)}
            exif = image.getexif()
    except DAMAGE:
        return None  # scoring reports it
    if parameters := text.get("parameters"):
        return _before_settings(parameters).strip() or None
    if prompt := text.get("prompt"):
        return _of_graph(prompt) if prompt.lstrip().startswith("{") else prompt.strip()
    for description in (text.get("Description"), exif.get(DESCRIPTION)):
        if isinstance(description, str) and description.strip():
            return description.strip()
    return None


def _of_graph(text: str) -> str | None:
    """The prompt in a ComfyUI graph: the text of the node that a sampler's `positive` links to."""
    if (nodes := json_object(text.encode())) is None:
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
    """The other columns of a table, in order."""
    return list(dict.fromkeys(key for item in items for key in item.meta))
