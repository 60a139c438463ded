"""Checks of the images in prompt rows before any weights load."""

from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.errors import UserError
from flowrl.models.description import describe
from flowrl.prompts import PromptSet
from flowrl.prompts.prompt_set import PromptRow
from flowrl.settings import ModelSettings
from rewards.perception.files import check_image_file, open_image_bytes, open_image_file

DECODED = 200  # files that are decoded before a run starts; of the others the header is read


def check_images(model: ModelSettings, prompts: PromptSet) -> None:
    """UserError, with the row's place, for an image that the model could not read: a missing or
    damaged file, or a row without one where others have one. Only the first DECODED files are
    decoded completely."""
    columns = prompts.columns
    described = None if model.own is not None else describe(model)
    names = [] if described is None else described.image_columns(columns)
    seen = set[Any]()
    for name in names:
        given = [bool(row.get(name)) for row in prompts.meta]
        for row, has in zip(prompts.meta, given, strict=True):
            place = row.place if isinstance(row, PromptRow) else "a prompt's row"
            if has:
                _check(row[name], f"{place}, {name}", seen)
            elif any(given) and model.pipeline is not None:
                raise UserError(f"{place} has no {name}, but other prompts do")


def _check(value: Any, place: str, seen: set[Any]) -> None:
    for file in _files(value):
        if file in seen:
            continue
        seen.add(file)
        try:
            if isinstance(file, bytes):
                open_image_bytes(file, "bytes") if len(seen) <= DECODED else None
            elif len(seen) <= DECODED:
                open_image_file(file)
            else:
                check_image_file(file)
        except ValueError as error:
            raise UserError(f"{place}: {error}") from error


def _files(value: Any) -> Iterator[str | bytes]:
    """Paths and bytes in a cell; the model reads other values, such as images from Python."""
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, Mapping):
            each = each.get("bytes") or each.get("path")
        if isinstance(each, str | bytes):
            yield each
