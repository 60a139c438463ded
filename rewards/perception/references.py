"""Images named by a column of the prompt file: the source of an edit, or a reference."""

import reprlib
import warnings
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL.Image import Image
from torch import Tensor

from rewards.perception.files import open_image_cell
from rewards.perception.media import to_tensor
from rewards.types import Samples, cell


def column_images(reward: str, samples: Samples, column: str) -> list[Tensor | None]:
    """Image [3 h w] from each sample's column, a cell of `open_image_cell`; None, with a warning,
    if it cannot be read. ValueError, naming the column, for anything else."""
    values = [cell(row, column) for row in samples.meta] or [None] * len(samples.prompts)
    for value in values:
        _check_image(reward, column, value)
    return read_references(f"{reward}:", values)


def read_references(place: str, values: Sequence[Any]) -> list[Tensor | None]:
    """Image [3 h w] of each cell; None for an empty cell and, with a warning that begins with
    `place`, for one that cannot be read. Equal cells are read once."""
    pixels: dict[Hashable, Tensor | None] = {None: None}
    keys = [reference_key(value) for value in values]
    for key, value in zip(keys, values, strict=True):
        if key not in pixels:
            try:
                pixels[key] = to_tensor(open_image_cell(value))
            except ValueError as error:
                warnings.warn(f"{place} {error}; its samples are unscored", stacklevel=2)
                pixels[key] = None
    return [pixels[key] for key in keys]


def reference_key(value: Any) -> Hashable:
    """The same value for two cells with the same image: its path, its bytes, or the image object;
    None for an empty cell."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str | Path):
        return str(value) or None
    if value is None or isinstance(value, bytes):
        return value
    return type(value).__name__, id(value)


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
    inner = value.get("bytes") or value.get("path") if isinstance(value, Mapping) else value
    if value is not None and not isinstance(inner, str | Path | Image | bytes):
        raise ValueError(
            f"{place}: the column {column!r} must name one image, not {reprlib.repr(value)}"
        )
