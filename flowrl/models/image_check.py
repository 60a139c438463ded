"""Checks of the images, videos and sounds in prompt rows before any weights load."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowrl.errors import UserError
from flowrl.models.description import describe
from flowrl.models.diffusers.call.inputs.columns import (
    IN_CALL,
    ImageFile,
    file_of_cell,
    files_of_cells,
)
from flowrl.prompts import PromptSet
from flowrl.prompts.prompt_set import SOUND_COLUMNS, VIDEO_COLUMNS, PromptRow
from flowrl.settings import ModelSettings, OwnSettings, PipelineSettings
from rewards.checks.winnable import Winnable
from rewards.perception.files import check_image_file, open_image_bytes, open_image_file
from rewards.perception.sound_files import open_sound_bytes, open_sound_file
from rewards.perception.video_files import moves, open_video_bytes, open_video_file

DECODED = 200  # files that are decoded before a run starts; the others before their row is drawn
DECODED_VIDEOS = 8  # likewise of videos


def check_images(model: ModelSettings, prompts: PromptSet) -> None:
    """UserError, with the row's place, for an image, a video or a sound that the model could not
    read: a missing or damaged file, or a row without one where others have one; also for those that
    `model.call` names. The first DECODED images and DECODED_VIDEOS videos are decoded completely;
    of the others the header is read, and `ImageRows` decodes them before they are drawn. Sounds are
    read completely."""
    columns = prompts.columns
    described = None if isinstance(model, OwnSettings) else describe(model)
    if described is None:
        return
    sound_names, seen = described.sound_columns(columns), _Seen()
    for name in [*described.image_columns(columns), *sound_names]:
        has_file = [bool(row.get(name)) for row in prompts.meta]
        for row, has in zip(prompts.meta, has_file, strict=True):
            place = row.place if isinstance(row, PromptRow) else "a prompt's row"
            if has:
                _check(row[name], f"{place}, {name}", seen, _opener(name, model))
            elif any(has_file) and isinstance(model, PipelineSettings):
                raise UserError(f"{place} has no {name}, but other prompts do")
    if isinstance(model, PipelineSettings):
        arguments = [name for name, value in model.call.items() if value is not None]
        for name in [*described.image_columns(arguments), *described.sound_columns(arguments)]:
            _check(model.call[name], f"{IN_CALL}, {name}", seen, _opener(name, model))


@dataclass
class _Seen:
    """Files that were checked, and how many videos among them."""

    files: set[Any] = field(default_factory=set[Any])
    videos: int = 0

    def another_video(self) -> int:
        """Count a video; returns how many there were with it."""
        self.videos += 1
        return self.videos


_Opener = Callable[[ImageFile, _Seen], None]


def _check(value: Any, place: str, seen: _Seen, opener: _Opener) -> None:
    try:
        for file in _files(value):
            if file not in seen.files:
                seen.files.add(file)
                opener(file, seen)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from error


def _opener(name: str, model: ModelSettings) -> _Opener:
    """Choose the reader of a column's files: pipelines take videos."""
    if SOUND_COLUMNS.fullmatch(name):
        return _hear
    moving = isinstance(model, PipelineSettings) and VIDEO_COLUMNS.fullmatch(name)
    return _watch if moving else _see


def _see(file: ImageFile, seen: _Seen) -> None:
    if not isinstance(file, str):
        open_image_bytes(*file) if len(seen.files) <= DECODED else None
    elif len(seen.files) <= DECODED:
        open_image_file(file)
    else:
        check_image_file(file)


def _watch(file: ImageFile, seen: _Seen) -> None:
    if _moves(file):
        if seen.another_video() <= DECODED_VIDEOS:
            _open_video(file)
    else:
        _see(file, seen)


def _moves(file: ImageFile) -> bool:
    return moves(file if isinstance(file, str) else file[0])


def _open_video(file: ImageFile) -> None:
    """Decode all frames, and keep the first and the last."""
    if isinstance(file, str):
        open_video_file(file, most=2)
    else:
        open_video_bytes(*file, most=2)


def _hear(file: ImageFile, _: _Seen) -> None:
    open_sound_file(file) if isinstance(file, str) else open_sound_bytes(*file)


@dataclass(frozen=True)
class ImageRows:
    """Whether the images of rows can be decoded, as `rewards.checks.winnable` asks. `names`: the
    columns that the model takes."""

    names: tuple[str, ...]

    def winnable(
        self,
        prompts: Sequence[str],  # noqa: ARG002
        meta: Sequence[Mapping[str, Any]],
    ) -> list[Winnable]:
        return [self._decoded(row) for row in meta]

    def _decoded(self, row: Mapping[str, Any]) -> Winnable:
        for name in self.names:
            try:
                for file in _files(row.get(name)):
                    if VIDEO_COLUMNS.fullmatch(name) and _moves(file):
                        _open_video(file)
                    elif isinstance(file, str):
                        open_image_file(file)
                    else:
                        open_image_bytes(*file)
            except ValueError as error:
                return Winnable("no", f"{name}: {error}")
        return Winnable("yes")

    def answer_keys(self, _: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """A hash of each row's files, by path, size and time."""
        return [self._key(row) for row in meta]

    def _key(self, row: Mapping[str, Any]) -> str | None:
        files = [file for name in self.names for file in _files(row.get(name))]
        digest = hashlib.sha256()
        for file in files:
            digest.update(repr(_stamp(file)).encode() if isinstance(file, str) else file[0])
        return f"image:{digest.hexdigest()}" if files else None


def _stamp(file: str) -> tuple[str, int, int]:
    path = Path(file.partition("#")[0])
    stat = path.stat() if path.is_file() else None
    return (file, 0, 0) if stat is None else (file, stat.st_size, stat.st_mtime_ns)


def _files(value: Any) -> Iterator[ImageFile]:
    """Paths in a cell, and bytes with their names; the model reads other values, such as images
    from Python. ValueError for a mapping with neither, and for a number, as the model says it."""
    if isinstance(value, list | tuple):
        yield from (file for file in files_of_cells(value) if file is not None)
        return
    file = file_of_cell(value)
    if file is not None:
        yield file
