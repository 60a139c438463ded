"""Sources of samples: a file, a part of one, or bytes in a table.

A part of an image is written as a W3C media fragment: `sheet.png#xywh=64,0,32,32`.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageSequence
from torch import Tensor

from flowrl.errors import UserError
from rewards.perception.files import PIECE, Read
from rewards.perception.media import to_tensor

IMAGE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"))
MOVING = frozenset((".gif",))
VIDEOS = frozenset((".mp4", ".webm", ".mov", ".mkv", ".avi"))
MEDIA_SUFFIXES = IMAGE_SUFFIXES | MOVING | VIDEOS


@dataclass(frozen=True)
class Source:
    """Source of one image or video. `name` is its name in reports."""

    name: str
    path: Path | None = None
    data: bytes | None = field(default=None, repr=False)
    box: tuple[int, int, int, int] | None = None  # x, y, width, height in pixels

    @classmethod
    def of(cls, cell: Any, folder: Path, place: str) -> "Source":
        """Read a cell of a table: a path relative to `folder`, a part of a file, bytes, or
        the mapping {"bytes", "path"} that `datasets` stores. UserError, at `place`, for
        anything else."""
        if isinstance(cell, bytes):
            return cls(place, data=cell)
        if isinstance(cell, Mapping) and "bytes" in cell:
            if cell["bytes"] is not None:
                return cls(str(cell.get("path") or place), data=cell["bytes"])
            cell = cell.get("path")
        if not isinstance(cell, str) or not cell:
            raise UserError(
                f"{place}: {str(cell)[:60]!r} is neither a path nor the bytes of a file"
            )
        if match := PIECE.fullmatch(cell):
            x, y, width, height = map(int, match.groups()[1:])
            return cls(cell, folder / match[1], box=(x, y, width, height))
        return cls(cell, folder / cell)


def read_media(sources: Sequence[Source], frames: int = 16) -> Read:
    """Read images [3 h w] and videos [f 3 h w] in 0..1, None for entries in `broken`.

    At most `frames` frames of a video are kept, evenly spaced, including the first and the last.
    """
    media: list[Tensor | None] = []
    broken: dict[str, str] = {}
    for source in sources:
        try:
            media.append(_read(source, frames))
        # PIL's errors for files that are missing, cut off, no images, or absurdly large
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            media.append(None)
            broken[source.name] = _sentence(source, error)
    return Read(media, broken)


def _sentence(source: Source, error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{source.name}: no such file"
    if source.path is not None and source.path.is_file() and source.path.stat().st_size == 0:
        return f"{source.name}: an empty file"
    return f"{source.name}: not readable ({error})"


def _read(source: Source, frames: int) -> Tensor:
    suffix = Path(source.name).suffix.lower()
    content = source.path if source.data is None else io.BytesIO(source.data)
    assert content is not None, source
    if suffix in VIDEOS:
        return _video(content, frames)
    if source.box is not None:
        assert source.path is not None
        x, y, width, height = source.box
        sheet = _sheet(source.path)
        if x + width > sheet.shape[2] or y + height > sheet.shape[1] or not width or not height:
            raise ValueError(f"the piece lies outside the image of {list(sheet.shape[1:])} px")
        return sheet[:, y : y + height, x : x + width].clone()
    with Image.open(content) as image:
        count = getattr(image, "n_frames", 1)  # PIL's own name for it; still formats have none
        if count == 1:
            return to_tensor(image)
        at = spaced(count, frames)
        return torch.stack(
            [to_tensor(f.copy()) for i, f in enumerate(ImageSequence.Iterator(image)) if i in at]
        )


@lru_cache(maxsize=4)
def _sheet(path: Path) -> Tensor:
    with Image.open(path) as image:
        return to_tensor(image)


def _video(content: Any, frames: int) -> Tensor:
    try:
        import av  # type: ignore[import-not-found]
        from av.error import FFmpegError  # type: ignore[import-not-found]
    except ImportError as error:
        raise OSError("videos need PyAV: pip install 'flowrl[video]'") from error
    try:
        opened: Any = av.open(content)  # its stubs do not tell reading from writing
        with opened as container:
            count = container.streams.video[0].frames  # 0 where the container does not say
            at = spaced(count, frames) if count else None
            kept = [
                to_tensor(frame.to_image())
                for i, frame in enumerate(container.decode(video=0))
                if at is None or i in at
            ]
    except (FFmpegError, IndexError) as error:
        raise OSError(str(error) or "it has no video stream") from error
    if not kept:
        raise OSError("it has no frames")
    return torch.stack([kept[i] for i in sorted(spaced(len(kept), frames))])


def spaced(count: int, most: int) -> set[int]:
    """At most `most` evenly spaced indices below `count`, including both ends (or only the middle
    one)."""
    if count <= most:
        return set(range(count))
    if most == 1:
        return {count // 2}
    return {round(i * (count - 1) / (most - 1)) for i in range(most)}
