"""Pictures from files. A file that cannot be read names itself, and the others are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import Tensor

from rewards.perception.media import to_tensor


@dataclass(frozen=True)
class Read:
    """media: one image [3 h w] in 0..1 a path, None where `broken` says why it could not be read.

    `Samples(read.media, ...)` may be scored as it is: those samples are then unscored.
    """

    media: list[Tensor | None]
    broken: dict[str, str]  # path: a sentence with the path in it


def read_images(paths: Sequence[str | Path]) -> Read:
    """Images of any sizes and modes. Never raises for a file that is missing or damaged."""
    media: list[Tensor | None] = []
    broken: dict[str, str] = {}
    for path in map(Path, paths):
        try:
            with Image.open(path) as image:
                media.append(to_tensor(image))
        # PIL raises these for what is missing, no picture, cut off or too large to be sane;
        # SyntaxError is what its PNG reader says of a damaged chunk
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            media.append(None)
            broken[str(path)] = _sentence(path, error)
    return Read(media, broken)


def _sentence(path: Path, error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{path}: no such file"
    if path.is_dir():
        return f"{path}: a folder, not a picture"
    if path.stat().st_size == 0:
        return f"{path}: an empty file"
    return f"{path}: not a readable picture ({error})"
