"""A prompt's own height, width, number of frames and seconds of sound, from columns of its row."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flowrl.errors import UserError
from flowrl.prompts.prompt_set import PromptRow

FRAMES = "frames"  # another name of the column `num_frames`


class RowSize(NamedTuple):
    """Sizes that a row sets, in pixels, frames and seconds; None for those of the run. The length
    of a sound is named as the pipelines' own arguments are."""

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    audio_end_in_s: float | None = None
    audio_length_in_s: float | None = None
    audio_duration: float | None = None
    audio_duration_s: float | None = None
    duration: float | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The sizes that the row sets, named like arguments of a pipeline."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        return described(self.given)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "RowSize":
        """Read a row. UserError, with its place, for heights, widths and numbers of frames that are
        no whole numbers above 0. A column `frames` that holds no number, such as a list of images,
        is not a size, and neither is one of seconds, such as `duration: short`: `check_seconds`
        refuses it where the pipeline takes it."""
        place = row.place if isinstance(row, PromptRow) else "a prompt's row"
        sizes: dict[str, Any] = {
            name: _size(row.get(name), f"{place}, {name}")
            for name in cls._fields
            if name not in LENGTHS_IN_SECONDS
        }
        sizes |= {name: _seconds(row.get(name)) for name in LENGTHS_IN_SECONDS}
        frames = row.get(FRAMES)
        if isinstance(frames, int | float) and not isinstance(frames, bool):
            other = _size(frames, f"{place}, {FRAMES}")
            if sizes["num_frames"] not in (None, other):
                raise UserError(
                    f"{place}: num_frames is {sizes['num_frames']} but {FRAMES} is {other}: keep "
                    "one of the two columns"
                )
            sizes["num_frames"] = other
        return cls(**sizes)


LENGTHS_IN_SECONDS = (
    "audio_end_in_s",
    "audio_length_in_s",
    "audio_duration",
    "audio_duration_s",
    "duration",
)


def described(sizes: Mapping[str, float | None]) -> str:
    """Sizes as "height 512, width 768, 33 frames", or "10 s"."""
    units = dict.fromkeys(LENGTHS_IN_SECONDS, "s") | {"num_frames": "frames"}
    values = {name: value for name, value in sizes.items() if value is not None}
    words = [f"{name} {value}" for name, value in values.items() if name not in units]
    return ", ".join(
        [*words, *(f"{values[name]:g} {unit}" for name, unit in units.items() if name in values)]
    )


def row_sizes(rows: Sequence[Mapping[str, Any]]) -> list[RowSize]:
    """The size of each row. UserError for a row whose size cannot be read."""
    return [RowSize.of(row) for row in rows]


def unsized(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row without its sizes."""
    cells = {name: value for name, value in row.items() if name not in (*RowSize._fields, FRAMES)}
    return PromptRow(cells, row.place) if isinstance(row, PromptRow) else cells


def check_seconds(rows: Sequence[Mapping[str, Any]], takes: Callable[[str], bool]) -> None:
    """UserError, with its place, for a cell that is no number of seconds above 0, in a column that
    a pipeline takes."""
    for name in filter(takes, LENGTHS_IN_SECONDS):
        for row in rows:
            value = row.get(name)
            if not _is_missing(value) and _seconds(value) is None:
                place = row.place if isinstance(row, PromptRow) else "a prompt's row"
                raise _no_size(f"{place}, {name}", value, "number of seconds above 0")


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or value != value  # pandas writes NaN for a missing number


def _seconds(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 < value < math.inf else None


def _size(value: Any, place: str) -> int | None:
    if _is_missing(value):
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or value < 1 or value % 1 != 0:  # infinity has the remainder NaN
        raise _no_size(place, value, "whole number of pixels or frames")
    return int(value)


def _no_size(place: str, value: Any, wanted: str) -> UserError:
    return UserError(
        f"{place}: {value!r:.50} is not a {wanted}: correct it, or leave the column out with `keep`"
    )
