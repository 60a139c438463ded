"""Images of files as tensors, and what is wrong with the others."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from rewards.perception.files import Read, open_image_file
from rewards.perception.media import to_tensor


def read_images(paths: Sequence[str | Path]) -> Read:
    """Read images of any size and mode. Does not raise for missing or damaged files."""
    media: list[Tensor | None] = []
    broken: dict[str, str] = {}
    for path in paths:
        try:
            media.append(to_tensor(open_image_file(path)))
        except ValueError as error:
            media.append(None)
            broken[str(path)] = str(error)
    return Read(media, broken)
