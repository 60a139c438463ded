"""Images that a column of the prompt file names: the source of an edit, or a reference."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rewards.perception.files import read_images
from rewards.types import Samples, cell


def column_images(reward: str, samples: Samples, column: str) -> list[Tensor | None]:
    """The image [3 h w] of each sample's column; None, with a warning, where it cannot be read."""
    paths = [cell(row, column) for row in samples.meta] or [None] * len(samples.prompts)
    named = [path for path in dict.fromkeys(paths) if path]
    files = read_images(named)
    for sentence in files.broken.values():
        warnings.warn(f"{reward}: {sentence}; its samples are unscored", stacklevel=2)
    found = dict(zip(named, files.media, strict=True))
    return [found.get(path) for path in paths]


def check_image_column(
    reward: str, column: str, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]
) -> None:
    """ValueError, naming the row, if a prompt has no image in the column."""
    for row in range(len(prompts)):
        if not meta or not cell(meta[row], column):
            raise ValueError(
                f"{reward}: row {row + 1} of the prompts has no column {column!r}, which names "
                "the image that it needs"
            )
