"""A prompt's own arguments: columns of the prompt file named like arguments of the pipeline.

`negative_prompt`, `prompt_2`, `lyrics` and similar ones are texts; `image`, `mask_image`,
`control_image` and similar ones are paths, lists of paths (several reference images), bytes as in
parquet, or images; `video` and similar ones are also paths or bytes of video files, or lists of
frames; `audio` and similar ones are paths or bytes of WAV files, or tensors. Only rewards read the
other columns. `call` may hold arguments that all rows share.
"""

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from flowrl.errors import UserError
from flowrl.prompts.prompt_set import IMAGE_COLUMNS, SOUND_COLUMNS, VIDEO_COLUMNS, PromptRow
from flowrl.prompts.row_sizes import RowSize
from rewards.audio import Audio
from rewards.perception.files import Stamp, file_stamp, open_image_bytes, open_image_file
from rewards.perception.media import to_rgb
from rewards.perception.sound import resampled
from rewards.perception.sound_files import open_sound_bytes, open_sound_file
from rewards.perception.video_files import moves, open_video_bytes, open_video_file

IN_CALL = "model.call"  # the place of arguments that all rows share
NO_FILE = "no file: expected a path, or {bytes, path}"  # of a cell

TEXT_COLUMNS = re.compile(r"(negative_)?prompt(_\d+)?|lyrics")
OPEN_IMAGES = 256  # images that stay open
OPEN_VIDEOS = 32  # of which all frames stay open
# sounds that a pipeline takes as [channels time]; it takes others as [1 channels time]
ONE_SOUND = ("reference_audio",)
RATIOS = tuple(Fraction(*sides) for sides in ((1, 1), (2, 1), (1, 2), (4, 3), (3, 4)))

Extra = Mapping[str, Any]
ImageFile = str | tuple[bytes, str]  # a path; or bytes, and their name in messages


class GivenForm(NamedTuple):
    """The form in which a pipeline takes sounds, if it takes any, and its number of frames, if its
    call sets one: of files of longer videos it gets evenly spaced ones."""

    sound: "SoundForm | None" = None
    frames: int | None = None

    def of_row(self, row: Mapping[str, Any], parameters: Iterable[str]) -> "GivenForm":
        """The form for a row, which may have a number of frames of its own."""
        frames = RowSize.of(row).num_frames if "num_frames" in parameters else None
        return self if frames is None else self._replace(frames=frames)


class SoundForm(NamedTuple):
    """The form in which a pipeline takes sounds: their rate in Hz, and their channels."""

    rate: int
    channels: int


def sounds(names: Iterable[str]) -> list[str]:
    """Names of sounds. Of a mapping from names to values or to parameters, those of switches and
    numbers are left out: `sample_audio: false`."""
    return [name for name in media_names(names) if SOUND_COLUMNS.fullmatch(name)]


def images(names: Iterable[str]) -> list[str]:
    """Names of images and videos; like `sounds`, none of switches and numbers
    (`render_text_images`)."""
    matching = [name for name in media_names(names) if IMAGE_COLUMNS.fullmatch(name)]
    return [name for name in matching if "ip_adapter" not in name]


def media_names(names: Iterable[str]) -> list[str]:
    """The names whose values may be media. A parameter's default stands for its values."""
    if not isinstance(names, Mapping):
        return list(names)
    values = {
        name: value.default if isinstance(value, inspect.Parameter) else value
        for name, value in names.items()
    }
    return [name for name, value in values.items() if not isinstance(value, bool | int | float)]


def shaping(names: Iterable[str]) -> list[str]:
    """Names of images, videos and sounds, whose form may decide on that of latents."""
    listed = media_names(names)
    return [*images(listed), *sounds(listed)]


def extras(
    rows: Sequence[Mapping[str, Any]], parameters: Iterable[str], form: GivenForm
) -> tuple[Extra, ...]:
    """Arguments from each prompt's row. A text that the row lacks but other rows have is None.

    Raises UserError, with the row's place in the prompt file, for an image, a video or a sound that
    cannot be read, and for a row that lacks one that other rows have.
    """
    names = list(parameters)
    shown = [name for name in images(parameters) if any(row.get(name) for row in rows)]
    sound_names = [
        name for name in sounds(parameters) if any(row.get(name) is not None for row in rows)
    ]
    columns = [*texts_of(names, rows), *shown, *sound_names]
    if not columns:
        return ()
    pairs = list(zip(rows, places(rows), strict=True))
    return tuple(
        {name: _value(name, row.get(name), at, form.of_row(row, names)) for name in columns}
        for row, at in pairs
    )


def instruction(prompt: str) -> str:
    """A prompt as JSON, for editors that take nothing else (Bria Fibo Edit): one that is no JSON
    object becomes the value of `edit_instruction`."""
    try:
        is_json = isinstance(json.loads(prompt), dict)
    except json.JSONDecodeError:
        is_json = False
    return prompt if is_json else json.dumps({"edit_instruction": prompt})


def texts_of(parameters: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The pipeline's text arguments, besides the prompt, for which some rows have a value."""
    texts = [name for name in parameters if TEXT_COLUMNS.fullmatch(name) and name != "prompt"]
    return [name for name in texts if any(row.get(name) for row in rows)]


def places(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Place of each row in its prompt file, for messages."""
    return [
        row.place if isinstance(row, PromptRow) else f"prompt {i + 1} of the batch"
        for i, row in enumerate(rows)
    ]


def _value(name: str, value: Any, place: str, form: GivenForm) -> Any:
    if TEXT_COLUMNS.fullmatch(name):
        return value or None
    if SOUND_COLUMNS.fullmatch(name):
        return _sound(name, value, place, form.sound)
    if value is None or (isinstance(value, str | list | tuple) and not value):
        raise UserError(f"{place} has no {name}, but other prompts do")
    try:
        if VIDEO_COLUMNS.fullmatch(name) and (file := _file_of(value)) is not None and _moves(file):
            return _video(file, form.frames, *_stamps([file]))
        return _picture(value)
    except ValueError as error:
        raise UserError(f"{place}, {name}: {error}") from error


def _sound(name: str, value: Any, place: str, form: SoundForm | None) -> Any:
    """The waveform [1 channels time] of a cell's file, in the pipeline's form; [channels time] for
    those of ONE_SOUND. Tensors are returned unchanged."""
    if isinstance(value, Tensor):
        return value
    if value is None or not value:
        raise UserError(f"{place} has no {name}, but other prompts do")
    try:
        file = file_of_cell(value)
        if file is None:
            raise ValueError("no sound: expected a path of a WAV file, or {bytes, path}")
        if form is None:
            raise ValueError("the pipeline's components name no rate and channels for it")
        return _heard(file, form, *_stamps([file]), alone=name in ONE_SOUND)
    except ValueError as error:
        raise UserError(f"{place}, {name}: {error}") from error


@lru_cache(OPEN_IMAGES)
def _heard(file: ImageFile, form: SoundForm, stamp: Stamp | None, *, alone: bool) -> Tensor:
    """The same file returns the same tensor, by which rows are grouped, until it changes."""
    del stamp
    audio = open_sound_file(file) if isinstance(file, str) else open_sound_bytes(*file)
    wave = waveform_in(audio, form)
    return wave[0] if alone else wave


def waveform_in(audio: Audio, form: SoundForm) -> Tensor:
    """One sound's waveform [1 channels time] at a rate and with channels: one channel becomes all
    of them, several become their mean where one is wanted. ValueError for other numbers."""
    wave = audio.waveform[0]
    if form.channels == 1:
        wave = wave.mean(0, keepdim=True)
    elif len(wave) == 1:
        wave = wave.expand(form.channels, -1)
    if len(wave) != form.channels:
        raise ValueError(f"a sound of {len(wave)} channels, where the model takes {form.channels}")
    return resampled(wave, audio.rate, form.rate)[None].contiguous()


def with_sounds(call: Mapping[str, Any], form: SoundForm | None) -> dict[str, Any]:
    """A call's arguments with the waveforms of those files of sounds that it names."""
    named = [name for name in sounds(call) if call[name] is not None]
    return {**call, **{name: _sound(name, call[name], IN_CALL, form) for name in named}}


def _file_of(value: Any) -> ImageFile | None:
    """The file of a cell that is one file; None for lists and other values."""
    return None if isinstance(value, list | tuple) else file_of_cell(value)


def _moves(file: ImageFile) -> bool:
    return moves(file if isinstance(file, str) else file[0])


@lru_cache(OPEN_VIDEOS)
def _video(file: ImageFile, frames: int | None, stamp: Stamp | None) -> list[Image.Image]:
    """The same file returns the same list, by which rows are grouped, until it changes."""
    del stamp
    return (
        open_video_file(file, frames)
        if isinstance(file, str)
        else open_video_bytes(*file, most=frames)
    )


def _picture(value: Any) -> Any:
    """The image or images of a cell: a path, bytes, or parquet's form {bytes, path}, or several of
    them. Other values, such as images from Python, are returned unchanged."""
    if isinstance(value, list | tuple):
        files = files_of_cells(value)
        paths = [file for file in files if file is not None]
        return open_images(tuple(paths)) if len(paths) == len(files) else value
    file = file_of_cell(value)
    return value if file is None else _opened(file, *_stamps([file]))


def files_of_cells(cells: Sequence[Any]) -> list[ImageFile | None]:
    """`file_of_cell` of each entry of a list. ValueError with the entry's place."""
    files = list[ImageFile | None]()
    for number, cell in enumerate(cells, 1):
        try:
            files.append(file_of_cell(cell))
        except ValueError as error:
            raise ValueError(f"entry {number} of {len(cells)}: {error}") from error
    return files


def file_of_cell(value: Any) -> ImageFile | None:
    """The path or the bytes of a cell's image; None for other values. ValueError for a mapping that
    has none, and for a number."""
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path")
        if isinstance(data, bytes):
            return data, str(path or "bytes")
        value = path
        if not isinstance(path, str):
            raise ValueError(NO_FILE)
    if isinstance(value, int | float):
        raise ValueError(NO_FILE)
    if isinstance(value, bytes):
        return value, "bytes"
    return str(value) if isinstance(value, str | Path) else None


def _stamps(files: Sequence[ImageFile]) -> tuple[Stamp | None, ...]:
    return tuple(file_stamp(file) if isinstance(file, str) else None for file in files)


def open_images(files: tuple[ImageFile, ...]) -> list[Image.Image]:
    """Open images. The same file returns the same object, by which rows are grouped, until it
    changes.

    Their pixels are those that rewards and the page of a run see (`to_rgb`). ValueError, one
    sentence with the path, for a file that `open_image_file` refuses.
    """
    return _all_opened(files, _stamps(files))


@lru_cache(OPEN_IMAGES)
def _opened(file: ImageFile, stamp: Stamp | None) -> Image.Image:
    del stamp
    return to_rgb(open_image_file(file) if isinstance(file, str) else open_image_bytes(*file))


@lru_cache(OPEN_IMAGES)
def _all_opened(
    files: tuple[ImageFile, ...], stamps: tuple[Stamp | None, ...]
) -> list[Image.Image]:
    return [_opened(file, stamp) for file, stamp in zip(files, stamps, strict=True)]


def by_image(extras: Sequence[Extra], together: Sequence[str] = ()) -> list[list[int]]:
    """Group rows with the same images, in order of their first row; for the columns `together`,
    images of the same form suffice."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, extra in enumerate(extras):
        names = [name for name in extra if not TEXT_COLUMNS.fullmatch(name)]
        shared = tuple(names) == tuple(together)
        key = tuple(image_form(extra[name]) if shared else id(extra[name]) for name in names)
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def image_form(value: Any) -> Any:
    """Size and mode of an image, or of each of several; any other value counts as its own form."""
    if isinstance(value, list):
        return tuple(image_form(image) for image in value)
    return (value.size, value.mode) if isinstance(value, Image.Image) else id(value)


def merged_call(extras: Sequence[Extra], *, per_row: bool) -> dict[str, Any]:
    """Arguments of a single call: texts as a list; images shared by all rows once or once per row;
    other images once per row."""
    if not extras:
        return {}
    arguments: dict[str, Any] = {}
    for name, value in extras[0].items():
        if TEXT_COLUMNS.fullmatch(name):
            arguments[name] = [extra[name] for extra in extras]
        else:
            shared = all(extra[name] is value for extra in extras)
            arguments[name] = value if shared and not per_row else [extra[name] for extra in extras]
    return arguments


def another_image(value: Any) -> Any:
    """Noise in the form of an image, or of each of several; other values are returned unchanged."""
    if isinstance(value, list):
        return [another_image(image) for image in value]
    if not isinstance(value, Image.Image):
        return value
    draws = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (value.height, value.width, 3), generator=draws)
    return Image.fromarray(pixels.byte().numpy()).convert(value.mode)


def reshaped(value: Any, ratio: Fraction) -> Any:
    """Resize an image, or each of several, to a given aspect ratio.

    The shorter side keeps its length.
    """
    if isinstance(value, list):
        return [reshaped(image, ratio) for image in value]
    if not isinstance(value, Image.Image):
        return value
    side = min(value.size)
    return value.resize((round(side * max(1, ratio)), round(side * max(1, 1 / ratio))))


def shared_images(call: Mapping[str, Any]) -> Extra:
    """Images among the arguments of `call`, which all rows share."""
    names = images({name: value for name, value in call.items() if value is not None})
    form = GivenForm(frames=call.get("num_frames"))
    return {name: _value(name, call[name], IN_CALL, form) for name in names}


def several(extra: Extra) -> dict[str, Sequence[Any]]:
    """Lists of several images; those of videos are frames."""
    listed = {name: extra[name] for name in images(extra) if not VIDEO_COLUMNS.fullmatch(name)}
    return {n: v for n, v in listed.items() if isinstance(v, list | tuple) and len(v) > 1}


def one_there(place: str, lists: Mapping[str, Sequence[Any]], owner: str) -> str:
    """The refusal of several images, where a pipeline takes one."""
    name, listed = next(iter(lists.items()))
    way = "give each row one"
    if place == IN_CALL:
        way = f"give it one, or leave it out, with one in each row of the prompts (column {name})"
    return f"{place}, {name}: {len(listed)} images, and {owner} takes one there: {way}"


def placeholder_sounds(names: Iterable[str], form: SoundForm) -> Extra:
    """Placeholder sounds for trial calls: a second of noise."""
    draws = torch.Generator().manual_seed(0)
    shape = (1, form.channels, form.rate)
    noise = {name: 0.1 * torch.randn(shape, generator=draws) for name in names}
    return {name: wave[0] if name in ONE_SOUND else wave for name, wave in noise.items()}


def placeholder_images(names: Iterable[str], width: int, height: int, frames: int = 9) -> Extra:
    """Placeholder images for trial calls, made before any prompt is known."""
    draws = torch.Generator().manual_seed(0)

    def picture() -> Image.Image:
        pixels = torch.randint(0, 256, (height, width, 3), generator=draws, dtype=torch.uint8)
        return Image.fromarray(pixels.numpy())

    def mask() -> Image.Image:
        pixels = torch.zeros(height, width, dtype=torch.uint8)
        pixels[: height // 2] = 255
        return Image.fromarray(pixels.numpy())

    placeholders: dict[str, Any] = {}
    for name in names:
        make = mask if "mask" in name else picture
        placeholders[name] = (
            [make() for _ in range(frames)] if VIDEO_COLUMNS.fullmatch(name) else make()
        )
    return placeholders
