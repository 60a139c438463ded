"""Read the file of given samples as rows: a prompt with a pair, or with one sample."""

import filecmp
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.errors import UserError, in_words
from flowrl.evaluation.preferences import LAYOUTS, Preferences, ReadOptions, load_preferences
from flowrl.evaluation.reader_words import OF_A_RUN
from flowrl.evaluation.sources import Source, read_media
from flowrl.models.image_check import DECODED
from flowrl.paths import find
from flowrl.prompts import PromptSet
from flowrl.prompts.conversations import answer_in
from flowrl.prompts.prompt_set import PromptRow, resolved
from flowrl.prompts.source import GIVEN_FILE, DataSource, check_column
from flowrl.settings import LanguageSettings, RunSettings
from flowrl.settings.sections.given import GivenSettings
from rewards.perception.files import DAMAGE, absence, header_size, in_short
from rewards.perception.moving import MEDIA_FORMATS
from rewards.types import cell

EVEN = 0.5


@dataclass(frozen=True)
class GivenItem:
    """A given sample: its source or text, and its place in the file for messages."""

    sample: Source | str
    place: str


@dataclass(frozen=True)
class GivenFile:
    """Rows of a prompt with `group` samples: the better and the worse one, or a single one.

    rows      the samples of each prompt, as indices into `items`
    left_out  ties, of which pairs of one sample twice are some, and rows without a judgement
    """

    prompts: PromptSet
    rows: tuple[tuple[int, ...], ...]
    items: tuple[GivenItem, ...]
    left_out: int = 0

    @property
    def group(self) -> int:
        return len(self.rows[0])

    @classmethod
    def read(cls, run: RunSettings) -> "GivenFile":
        """Read `given.file`. UserError, with the file and the line or row, if it cannot be read."""
        settings = run.given
        assert settings is not None
        if isinstance(run.model, LanguageSettings):
            return _texts(settings)
        with in_words(OF_A_RUN):
            return _pairs(settings) if settings.kind == "pairs" else _media(settings)

    def described(self, settings: GivenSettings, draws: int) -> str:
        """A line about the file, and about an iteration with `draws` prompts in total."""
        pairs = settings.kind == "pairs"
        noun, count = "pairs" if pairs else settings.kind, settings.count(draws)
        less = f", {self.left_out} ties and unjudged rows left out" * bool(self.left_out)
        rest = "" if settings.share == 1 else f"; {draws - count} prompts get generated samples"
        return (
            f"given: {len(self.rows)} {noun} of {len(set(self.prompts.texts))} prompts in "
            f"{settings.file}{less}; {count} per iteration, so an epoch is "
            f"{len(self.rows) / count:.3g} iterations{rest}"
        )


def _pairs(settings: GivenSettings) -> GivenFile:
    """Pairs of images or videos, read like those of `flowrl evaluate-rewards`."""
    if settings.layout is not None and settings.layout not in LAYOUTS:
        raise UserError(
            f"given.layout: {settings.layout!r} is not known; use one of {', '.join(LAYOUTS)}"
        )
    folder = None if settings.folder is None else find(settings.folder)
    choice = ReadOptions(settings.layout, settings.label, folder, columns=settings.columns)
    try:
        read = load_preferences(find(settings.file), choice)
    except UserError as error:
        raise UserError(f"{GIVEN_FILE}: {error}") from error
    if read.texts:
        raise UserError(
            f"{GIVEN_FILE}: {settings.file} has texts, but the run's model makes images"
        )
    judged = zip(read.a, read.b, read.label, strict=True)
    above = [
        (i, j, p)
        for i, j, p in judged
        if p != EVEN and not same_content(read.items[i].source, read.items[j].source)
    ]
    if not above:
        raise UserError(
            f"{GIVEN_FILE}: {settings.file}: all pairs are ties, or name one sample twice, which "
            "teaches nothing"
        )
    rows = tuple((int(i), int(j)) if p > EVEN else (int(j), int(i)) for i, j, p in above)
    texts = tuple(read.items[row[0]].prompt for row in rows)
    meta = tuple(_row_of(read, row[0], find(settings.file).parent) for row in rows)
    items = tuple(GivenItem(item.source, _place(item.meta)) for item in read.items)
    ties = len(read.label) - len(rows)
    return GivenFile(PromptSet(texts, meta), rows, items, ties + read.unlabelled)


def same_content(a: Source, b: Source) -> bool:
    """Whether two sources are one sample: the same file or copies of it, and the same part. Pixels
    are not compared here: rows that a model sees as one are masked when they are made
    (`flowrl.likelihoods.rows.unlike`)."""
    if a.box != b.box or a.text != b.text:
        return False
    if a.path is None or b.path is None or a.data is not None or b.data is not None:
        return _bytes_of(a) == _bytes_of(b)
    if a.path == b.path:
        return True
    both_exist = a.path.is_file() and b.path.is_file()  # others are named by the check of samples
    return both_exist and filecmp.cmp(a.path, b.path, shallow=False)


def _bytes_of(source: Source) -> bytes | None:
    if source.data is not None:
        return source.data
    return source.path.read_bytes() if source.path is not None and source.path.is_file() else None


def _row_of(read: Preferences, item: int, folder: Path) -> PromptRow:
    meta = read.items[item].meta
    return PromptRow(resolved(meta, folder), _place(meta))


def _place(meta: Any) -> str:
    return meta.place if isinstance(meta, PromptRow) else GIVEN_FILE


def _prompts(settings: GivenSettings) -> PromptSet:
    return PromptSet.of(
        DataSource(settings.file, settings.column, columns=settings.columns), GIVEN_FILE
    )


def _media(settings: GivenSettings) -> GivenFile:
    """Images or videos, each with its prompt."""
    prompts = _prompts(settings)
    columns = prompts.columns
    name = settings.media or next((n for n in ("image", "video") if n in columns), "image")
    check_column(prompts.meta, name, f"{GIVEN_FILE}: {settings.file}", "given.media")  # type: ignore[arg-type]
    folder = find(settings.file).parent if settings.folder is None else find(settings.folder)
    items = [
        GivenItem(Source.of(cell(row, name), folder, f"{_place(row)}, {name}"), _place(row))
        for row in prompts.meta
    ]
    return GivenFile(prompts, tuple((i,) for i in range(len(items))), tuple(items))


def _texts(settings: GivenSettings) -> GivenFile:
    """Completions of a language model: `chosen` and `rejected`, or one in `completion`."""
    prompts = _prompts(settings)
    pairs = settings.kind == "pairs"
    names = ("chosen", "rejected") if pairs else (settings.media or "completion",)
    setting = "given.columns" if pairs else "given.media"
    for name in names:
        check_column(prompts.meta, name, f"{GIVEN_FILE}: {settings.file}", setting)  # type: ignore[arg-type]
    items, rows, same = list[GivenItem](), list[tuple[int, ...]](), 0
    untied: list[int] = []
    for i, row in enumerate(prompts.meta):
        texts = [_completion(cell(row, name), f"{_place(row)}, {name}") for name in names]
        if pairs and texts[0] == texts[1]:
            same += 1
            continue
        untied.append(i)
        rows.append(tuple(range(len(items), len(items) + len(names))))
        items += [GivenItem(text, _place(row)) for text in texts]
    if not rows:
        raise UserError(
            f"{GIVEN_FILE}: {settings.file}: chosen and rejected are the same in every row"
        )
    texts, meta = prompts.take(untied)
    return GivenFile(PromptSet(tuple(texts), tuple(meta)), tuple(rows), tuple(items), same)


def _completion(value: Any, at: str) -> str:
    """A text, the assistant's message, or the one at the end of a chat."""
    text = answer_in(value)
    if text is None and isinstance(value, list):
        raise UserError(f"{at}: the chat does not end with an assistant message")
    if not isinstance(text, str) or not text:
        raise UserError(f"{at} is {value!r:.50}, not a text")
    return text


def read_sample(item: GivenItem, frames: int) -> Tensor:
    """Read an image [3 h w], or a video [f 3 h w] of at most `frames` frames, in 0..1.

    UserError, with the file and the row, if it cannot be read."""
    assert isinstance(item.sample, Source)
    read = read_media([item.sample], frames)
    if read.media[0] is None:
        raise UserError(f"{item.place}: {next(iter(read.broken.values()))}")
    return read.media[0]


def check_samples_of(
    file: GivenFile, settings: GivenSettings, size: tuple[int | None, ...]
) -> None:
    """UserError for a sample that is missing, damaged or, with `fit: exact`, not of the known
    `size` (height, width). Only the first DECODED files are decoded completely."""
    seen = set[object]()
    for item in file.items:
        source = item.sample
        assert isinstance(source, Source)
        key = source.path if source.data is None else id(source.data)
        if key in seen and source.box is None:
            continue
        seen.add(key)
        if source.data is None and (source.path is None or not source.path.is_file()):
            raise UserError(f"{item.place}: {in_short(source.name)}: {absence(source.name)}")
        height, width = _decoded_size(item) if len(seen) <= DECODED else _header_size(item)
        wrong = any(a not in (None, b) for a, b in zip(size, (height, width), strict=True))
        if wrong and height and settings.fit == "exact":
            raise UserError(wrong_size(item, (height, width), size))


def wrong_size(item: GivenItem, have: Sequence[int], want: Sequence[int | None]) -> str:
    """Error message for a given sample whose size (height, width) differs from the run's."""
    assert isinstance(item.sample, Source)
    return (
        f"{item.place}: {item.sample.name} has {have[1]} x {have[0]} pixels, but the run's "
        f"samples have {want[1]} x {want[0]}: set model.width and model.height, or given.fit: crop"
    )


def _decoded_size(item: GivenItem) -> tuple[int, int]:
    media = read_sample(item, 1)
    return media.shape[-2], media.shape[-1]


def _header_size(item: GivenItem) -> tuple[int, int]:
    """The upright size in a file's header; (0, 0) for videos and parts of files, whose size is not
    in the header."""
    source = item.sample
    assert isinstance(source, Source)
    if source.path is None or source.box is not None:
        return 0, 0
    try:
        return header_size(source.path, MEDIA_FORMATS)
    except DAMAGE:
        return 0, 0  # a video: it is read when it is due
