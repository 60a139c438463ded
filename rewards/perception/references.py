"""Images named by a column of the prompt file: the source of an edit, or a reference."""

import reprlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image
from torch import Tensor

from rewards.perception.files import read_images
from rewards.perception.media import to_tensor
from rewards.types import Samples, cell


def column_images(reward: str, samples: Samples, column: str) -> list[Tensor | None]:
    """Image [3 h w] from each sample's column, a path or a PIL image; None, with a warning, if it
    cannot be read. ValueError, naming the column, for anything else."""
    values = [cell(row, column) for row in samples.meta] or [None] * len(samples.prompts)
    for value in values:
        _check_image(reward, column, value)
    named = [path for path in dict.fromkeys(_path(value) for value in values) if path]
    files = read_images(named)
    for sentence in files.broken.values():
        warnings.warn(f"{reward}: {sentence}; its samples are unscored", stacklevel=2)
    found = dict(zip(named, files.media, strict=True))
    return [
        to_tensor(value) if isinstance(value, Image) else found.get(_path(value))
        for value in values
    ]


def _path(value: Any) -> str:
    return "" if value is None or isinstance(value, Image) else str(value)


def check_image_column(
    reward: str, column: str, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]
) -> None:
    """ValueError, naming the row, if its column has no image or several."""
    for row in range(len(prompts)):
        if not meta or not cell(meta[row], column):
            raise ValueError(
                f"{reward}: row {row + 1} of the prompts lacks the column {column!r}, which "
                "must name an image"
            )
        _check_image(f"{reward}: row {row + 1} of the prompts", column, cell(meta[row], column))


def _check_image(place: str, column: str, value: Any) -> None:
    if value is not None and not isinstance(value, str | Path | Image):
        raise ValueError(
            f"{place}: the column {column!r} must name one image, not {reprlib.repr(value)}"
        )
