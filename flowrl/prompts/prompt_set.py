"""A set of prompts, and the draws of each iteration."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import UserError
from flowrl.paths import find
from flowrl.prompts.chat import has_images, read_chat
from flowrl.prompts.conversations import spoken_in, with_prompts_found
from flowrl.prompts.files import read_rows
from flowrl.prompts.source import DataSource, check_column
from rewards.perception.files import PIECE
from rewards.rights import NotGranted, Right, need
from rewards.types import cell
from samplers.noise import generator

DATA_SET = "data_set"  # column with the name of a row's data set, where there are several

IMAGE_COLUMNS = re.compile(
    r"(.+_)?(images?|videos?)|conditioning_frames|image_reference|(control_)?mask"
)  # columns that hold images or videos
VIDEO_COLUMNS = re.compile(r"(.+_)?videos?|conditioning_frames")  # of these, that hold videos
SOUND_COLUMNS = re.compile(r"(.+_)?audio")  # columns that hold sounds
_MOST_CHARACTERS = 100_000  # of a prompt


class Draws(NamedTuple):
    """Draws of an iteration: ids that are unique in the run, and their prompts' rows. `merged` has
    the number of draws per group of compared samples, in order: usually one. `texts` are prompts
    that a model wrote for the draws; empty: the rows' prompts."""

    ids: tuple[int, ...]
    rows: tuple[int, ...]
    merged: tuple[int, ...]
    texts: tuple[str, ...] = ()

    @classmethod
    def each(cls, ids: Sequence[int], rows: Sequence[int]) -> "Draws":
        """Draws that each form their own group."""
        return cls(tuple(ids), tuple(rows), (1,) * len(ids))


class PromptRow(dict[str, Any]):
    """All columns of a prompt. `place` names its file and line in messages."""

    def __init__(self, columns: Mapping[str, Any], place: str) -> None:
        super().__init__(columns)
        self.place = place


@dataclass(frozen=True)
class PromptSet:
    """Prompts with all columns of their rows, which rewards receive as `meta`. A prompt of chat
    messages is a `flowrl.prompts.chat.Chat`.

    shares    of several data sets in order: the number of prompts of each, and its weight. Every
              iteration draws from each in proportion to its weight. Empty: no weights
    left_out  rows that are never drawn; they keep their index
    """

    texts: tuple[str, ...]
    meta: tuple[Mapping[str, Any], ...]
    shares: tuple[tuple[int, float], ...] = ()
    left_out: frozenset[int] = frozenset()

    @classmethod
    def read(cls, source: str, column: str, place: str) -> "PromptSet":
        """Read a file (jsonl, json, txt, csv, tsv, parquet), a folder or a hub data set.

        UserErrors begin with `place`: a missing or damaged file, a missing column, no rows, or a
        prompt that is not a text, with its line (or row, from 1).
        """
        return cls.of(DataSource(source, column), place)

    @classmethod
    def of(cls, data: DataSource, place: str) -> "PromptSet":
        """Read a data set with its selection of rows and columns. Raises the same UserErrors as
        `read`."""
        table, at = read_rows(data, place), f"{place}: {data.source}"
        column = data.columns.get(data.column, data.column)
        if column == "prompt":
            table = with_prompts_found(table, at)
        if data.source.lower().endswith(".txt") and column == "prompt":
            column = "text"
        if not table.rows:
            raise UserError(f"{at} has no prompts")
        check_column(table.rows, column, at)
        for name in data.columns.values():
            if name != column:
                check_column(table.rows, name, at, "columns")
        inside = "" if column in ("prompt", "text") else f", {column}"
        # images are relative to the file
        folders = table.folders or [find(data.source).parent] * len(table.rows)
        texts = [
            _prompt(spoken_in(row, column), f"{at}, {where}{inside}", data.drop_reply, folder)
            for row, where, folder in zip(table.rows, table.places, folders, strict=True)
        ]
        named = [{new: cell(row, old) for new, old in data.columns.items()} for row in table.rows]
        rows = zip(table.rows, named, table.places, folders, strict=True)
        try:
            meta = tuple(
                PromptRow(resolved({**row, **new}, folder), f"{at}, {where}")
                for row, new, where, folder in rows
            )
        except NotGranted as error:
            raise UserError(f"{at}: {error}") from error
        return cls(tuple(texts), meta)

    @classmethod
    def joined(cls, sets: Mapping[str, "PromptSet"], weights: Sequence[float] = ()) -> "PromptSet":
        """Combine several data sets. Rows get the same columns plus `data_set`, the key of their
        set. UserError if a row already has that column with another value."""
        names = dict.fromkeys(name for prompt_set in sets.values() for name in prompt_set.columns)
        rows: list[PromptRow] = []
        for key, prompt_set in sets.items():
            if any(row.get(DATA_SET, key) != key for row in prompt_set.meta):
                raise UserError(
                    f"prompts: the data set {key} has a column {DATA_SET!r}, which is reserved "
                    "for the key of each row's data set: leave it out with `keep`"
                )
            for row in prompt_set.meta:
                place = row.place if isinstance(row, PromptRow) else key
                rows.append(PromptRow({**dict.fromkeys(names), **row, DATA_SET: key}, place))
        counts = [len(prompt_set) for prompt_set in sets.values()]
        shares = tuple(zip(counts, weights, strict=True)) if weights else ()
        return cls(
            tuple(t for prompt_set in sets.values() for t in prompt_set.texts), tuple(rows), shares
        )

    @property
    def columns(self) -> list[str]:
        """The columns of all rows, in order."""
        return list(dict.fromkeys(name for row in self.meta for name in row))

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int]) -> tuple[list[str], list[Mapping[str, Any]]]:
        """Texts and columns of the given rows."""
        return [self.texts[row] for row in rows], [self.meta[row] for row in rows]

    def draw(self, iteration: int, count: int, seed: int, weights: Tensor | None = None) -> Draws:
        """The `count` draws of an iteration: every prompt once before any repeats, or distinct
        prompts in proportion to `weights` [prompts]; with `shares`, within each data set.

        A pure function of its arguments, so that a resumed run draws the same prompts.
        """
        ids = range(iteration * count, (iteration + 1) * count)
        rows: list[int] = []
        for part, (part_rows, number) in enumerate(
            zip(self._parts(), self._counts(count), strict=True)
        ):
            drawable = [row for row in part_rows if row not in self.left_out]
            more = () if part == 0 else (part,)
            if weights is not None:
                key = (seed, "prompts", iteration, *more)
                places = weighted_draw(weights[drawable], number, key)
            else:
                key = (seed, "prompts")
                places = _in_turn(len(drawable), iteration * number, number, key, more)
            rows += [drawable[place] for place in places]
        return Draws.each(ids, rows)

    def _parts(self) -> list[range]:
        """The rows of each data set that has a share; of all, without shares."""
        sizes = [size for size, _ in self.shares] or [len(self)]
        ends = list(accumulate(sizes))
        return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def part_of(self, row: int) -> range:
        """The rows from which the same share of draws is taken as from this one."""
        return next(part for part in self._parts() if row in part)

    def without(self, rows: Iterable[int], place: str) -> "PromptSet":
        """The same set, of which these rows are never drawn. UserError, beginning with `place`, if
        a data set has no other row."""
        left_out = self.left_out | frozenset(rows)
        for part in self._parts():
            if all(row in left_out for row in part):
                first = self.meta[part.start]
                name = f" of {first.get(DATA_SET)}" if self.shares else ""
                raise UserError(f"{place}: no row{name} is left to draw")
        return replace(self, left_out=left_out)

    def _counts(self, count: int) -> list[int]:
        """The share of each data set of `count` draws, by largest remainders."""
        if not self.shares:
            return [count]
        whole = sum(weight for _, weight in self.shares)
        exact = [count * weight / whole for _, weight in self.shares]
        parts = [int(value) for value in exact]
        left = sorted(range(len(exact)), key=lambda i: (parts[i] - exact[i], i))
        for i in left[: count - sum(parts)]:
            parts[i] += 1
        return parts

    def never_drawn(self, count: int) -> list[int]:
        """Data sets from which iterations of `count` draws never take a prompt."""
        return [i for i, part in enumerate(self._counts(count)) if part == 0]

    def weights(self) -> Tensor:
        """Weight of each prompt [prompts] from `shares`, float64; 1 without them; 0 for rows that
        are left out."""
        parts = [torch.full((size,), w / size) for size, w in self.shares]
        joined = torch.cat(parts).double() if parts else torch.ones(len(self), dtype=torch.float64)
        joined[sorted(self.left_out)] = 0
        return joined

    def digest(self) -> str:
        """A hash of all prompts and columns, for data sets without a file."""
        digest = hashlib.sha256()
        for text, row in zip(self.texts, self.meta, strict=True):
            digest.update(json.dumps([text, row], default=repr, sort_keys=True).encode())
        return digest.hexdigest()


def _in_turn(
    size: int, begin: int, count: int, key: tuple[int | str, ...], part_key: tuple[int, ...]
) -> list[int]:
    """Draws `begin` to `begin + count` of `size` prompts: every prompt once before any repeats."""
    rows, order, last_epoch = list[int](), list[int](), -1
    for i in range(begin, begin + count):
        epoch, place = divmod(i, size)
        if epoch != last_epoch:
            rng = generator(*key, epoch, *part_key)
            order, last_epoch = torch.randperm(size, generator=rng).tolist(), epoch
        rows.append(order[place])
    return rows


def _prompt(text: Any, at: str, drop_reply: bool, folder: Path) -> str:
    """Read a prompt: a text or a chat, with image paths relative to `folder`. UserErrors begin with
    `at`."""
    if isinstance(text, list):
        text = read_chat(text, at, drop_reply, partial(_whole, folder=folder))
        if not text and has_images(text):
            return text  # an image without a word
    text = checked_text(text, at)
    if len(text) > _MOST_CHARACTERS:
        raise UserError(f"{at}: the prompt has more than {_MOST_CHARACTERS} characters")
    return text


def checked_text(text: Any, at: str) -> str:
    """The text of a prompt. UserErrors, for what is no text and for one that no model can read,
    begin with `at`."""
    if text is not None and not isinstance(text, str):
        raise UserError(f"{at}: the prompt is {text!r:.50}, not a text")
    if text is None or not any(map(_shows, text)):
        raise UserError(f"{at}: the prompt is empty")
    if "\0" in text:
        raise UserError(
            f"{at}: the prompt contains the character NUL, which ends a text in other programs"
        )
    if has_half_pair(text):
        raise UserError(f"{at}: the prompt contains half a surrogate pair, which is not valid text")
    return text


def has_half_pair(text: str) -> bool:
    """Whether a text has half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _shows(letter: str) -> bool:
    """Whether a character is more than a space or an invisible mark, such as U+200B or U+FEFF."""
    return not letter.isspace() and unicodedata.category(letter) != "Cf"


def resolved(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The row of a prompt file with absolute paths of images and sounds; the file's are relative to
    `folder`."""
    return {
        name: _whole(value, folder)
        if IMAGE_COLUMNS.fullmatch(name) or SOUND_COLUMNS.fullmatch(name)
        else value
        for name, value in row.items()
    }


def _whole(value: Any, folder: Path, levels: int = 2) -> Any:
    if isinstance(value, list | tuple) and levels:
        return [_whole(one, folder, levels - 1) for one in value]
    if isinstance(value, Mapping) and isinstance(value.get("path"), str):
        return {**value, "path": _whole(value["path"], folder)}
    piece = PIECE.fullmatch(value) if isinstance(value, str) else None
    if (
        isinstance(value, str)
        and value
        and _is_file(file := folder / (piece[1] if piece else value))
    ):
        need(Right.FILES, value, path=file)
        return str((folder / value).absolute())  # whatever folder a later reader adds
    return value


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with characters that no name has
        return False


def evaluated_rows(prompts: int, samples: int, per_prompt: int) -> tuple[int, ...]:
    """Rows of the prompts, evenly spaced, of an evaluation with about `samples` samples and at
    least `per_prompt` of each prompt."""
    count = max(1, min(prompts, samples // per_prompt))
    return tuple(i * prompts // count for i in range(count))


def uncertainty(
    rates: Float[Tensor, " g"], visits: Float[Tensor, " g"], fade: float = 0.0, floor: float = 0.05
) -> Float[Tensor, " g"]:
    """Weights of prompts, sqrt(p (1 - p)) / visits^fade + floor: largest at a success rate of 1/2
    and never 0 (single-stream, arXiv:2509.13232)."""
    spread = (rates * (1 - rates)).clamp(min=0).sqrt()
    return spread / visits.clamp(min=1) ** fade + floor


def weighted_draw(weights: Float[Tensor, " g"], count: int, key: Sequence[int | str]) -> list[int]:
    """`count` distinct prompts drawn without replacement, in proportion to their weights.

    The noise is keyed, so a resumed run draws the same prompts.
    """
    positive = int((weights > 0).sum())
    if count > positive:
        raise UserError(f"{count} prompts are needed, but only {positive} have a positive weight")
    uniform = torch.rand(len(weights), generator=generator(*key), dtype=torch.float64)
    return (weights.double().log() - (-uniform.log()).log()).topk(count).indices.tolist()
