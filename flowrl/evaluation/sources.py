"""Sources of samples: a file, a part of one, or bytes in a table.

A part of an image is written as a W3C media fragment: `sheet.png#xywh=64,0,32,32`.
"""

import io
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import UnidentifiedImageError
from torch import Tensor

from flowrl.errors import UserError
from flowrl.prompts.prompt_set import has_half_pair
from rewards.audio import Audio
from rewards.perception.contents import FIRST_BYTES, open_plain, unlike_its_name
from rewards.perception.files import (
    DAMAGE,
    PIECE,
    Read,
    absence,
    in_short,
    no_path,
    open_image_file,
)
from rewards.perception.media import to_tensor
from rewards.perception.moving import (
    MEDIA_FORMATS,
    is_video,
    read_image_or_frames,
    read_video_frames,
)
from rewards.perception.sound_files import is_wav, read_wav
from rewards.types import Kind

IMAGE_SUFFIXES = frozenset(
    (".png", ".apng", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".tif", ".tiff")
)
MOVING = frozenset((".gif",))
VIDEOS = frozenset((".mp4", ".m4v", ".webm", ".mov", ".mkv", ".avi"))
SOUNDS = frozenset((".wav",))
MEDIA_SUFFIXES = IMAGE_SUFFIXES | MOVING | VIDEOS | SOUNDS


@dataclass(frozen=True)
class Source:
    """Source of one image, video or text. `name` is its name in reports."""

    name: str
    path: Path | None = None
    data: bytes | None = field(default=None, repr=False)
    box: tuple[int, int, int, int] | None = None  # x, y, width, height in pixels
    text: str | None = field(default=None, repr=False)

    @property
    def kind(self) -> Kind:
        """Its kind, as far as its name says: a video's is "image"."""
        if self.text is not None:
            return "text"
        return "sound" if Path(self.name).suffix.lower() in SOUNDS else "image"

    @classmethod
    def of(cls, cell: Any, folder: Path, place: str) -> "Source":
        """Read a cell of a table: a path relative to `folder`, a part of a file, bytes, or
        the mapping {"bytes", "path"} that `datasets` stores. UserError, at `place`, for
        anything else."""
        if isinstance(cell, bytes):
            return cls(place, data=cell)
        if isinstance(cell, Mapping) and "bytes" in cell:
            if isinstance(cell["bytes"], bytes):
                return cls(str(cell.get("path") or place), data=cell["bytes"])
            if cell["bytes"] is not None:
                raise UserError(
                    f"{place}: the bytes of a file are {reprlib.repr(cell['bytes'])}, which a "
                    "table of text cannot hold: save the table as parquet, or give a path"
                )
            cell = cell.get("path")
        if not isinstance(cell, str) or not cell:
            raise UserError(
                f"{place}: {reprlib.repr(cell)} is neither a path nor the bytes of a file: give a "
                "path relative to the table (or to --images), or leave the row out"
            )
        if has_half_pair(cell):
            raise UserError(
                f"{place}: the path {cell!a} contains half a surrogate pair: correct it"
            )
        if match := PIECE.fullmatch(cell):
            x, y, width, height = map(int, match.groups()[1:])
            return cls(cell, folder / match[1], box=(x, y, width, height))
        return cls(cell, folder / cell)


def read_media(sources: Sequence[Source], frames: int = 16) -> Read:
    """Read images [3 h w] and videos [f 3 h w] in 0..1, sounds, texts, and None for entries in
    `broken`.

    At most `frames` frames of a video or an animation are kept, evenly spaced in time, including
    the first and the last. What the pixels of each form of file are is in docs/pixels.md.
    """
    media: list[Any] = []
    broken: dict[str, str] = {}
    for source in sources:
        if source.text is not None:
            media.append(source.text)
            continue
        try:
            media.append(_read(source, frames))
        except DAMAGE as error:  # missing, cut off, no images, or absurdly large
            media.append(None)
            broken[source.name] = _sentence(source, error)
    return Read(media, broken)


def _sentence(source: Source, error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) or no_path(source.name) is not None:
        return f"{in_short(source.name)}: {absence(source.name)}"
    begin = _beginning(source)
    if begin == b"":
        return f"{source.name}: an empty file"
    if begin and (mismatch := unlike_its_name(source.name.partition("#")[0], begin)) is not None:
        return f"{source.name}: it {mismatch}"
    if isinstance(error, UnidentifiedImageError):  # whose words have the address of an object
        return f"{source.name}: not readable (no image, video or sound of a known form)"
    reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
    return f"{source.name}: not readable ({' '.join(str(reason).split())})"


def _beginning(source: Source) -> bytes | None:
    """The first bytes of a source; None where they cannot be read."""
    content = _content(source)
    try:
        return None if content is None else _head(content)
    except (OSError, ValueError):  # no rights, a pipe, a name that no file can have
        return None


def _read(source: Source, frames: int) -> Tensor | Audio:
    by_name = Path(source.name.partition("#")[0]).suffix.lower() in VIDEOS
    if source.box is not None:
        assert source.path is not None
        if by_name:
            raise ValueError("a part of a video cannot be read: name the whole file")
        left, top, width, height = source.box
        piece = f"{source.path}#xywh={left},{top},{width},{height}"
        return to_tensor(open_image_file(piece, formats=MEDIA_FORMATS))
    content = _content(source)
    assert content is not None, source
    begin = _head(content)
    if is_wav(begin):
        return read_wav(content)
    if by_name or is_video(begin):
        return read_video_frames(content, frames)
    if isinstance(content, io.BytesIO):
        return read_image_or_frames(content, frames)
    with open_plain(content) as file:
        return read_image_or_frames(file, frames)


def _content(source: Source) -> Path | io.BytesIO | None:
    """The file or the bytes of a source; None for a text."""
    return source.path if source.data is None else io.BytesIO(source.data)


def _head(content: Path | io.BytesIO) -> bytes:
    if isinstance(content, io.BytesIO):
        return content.getvalue()[:FIRST_BYTES]
    with open_plain(content) as file:
        return file.read(FIRST_BYTES)
