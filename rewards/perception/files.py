"""Images from files, bytes and cells of tables. Unreadable files are reported; the others are read.

A part of an image is written as a W3C media fragment: `sheet.png#xywh=64,0,32,32`. What the pixels
of a file are, `to_rgb` says; an animation's image is its first frame, and so is that of a camera's
JPEG with a preview inside (MPO).
"""

import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from struct import error as StructError
from typing import IO, Any, TypeVar

from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from rewards.perception.contents import (
    FIRST_BYTES,
    file_unlike_its_name,
    open_plain,
    unlike_its_name,
)
from rewards.perception.media import to_tensor
from rewards.rights import Right, need

PIECE = re.compile(r"(.+)#xywh=(?:pixel:)?(\d{1,9}),(\d{1,9}),(\d{1,9}),(\d{1,9})")
OPEN_SHEETS = 4  # sheets that stay decoded while pieces of them are read
T = TypeVar("T")
Stamp = tuple[int, int]
Formats = tuple[str, ...]
FORMATS = ("PNG", "JPEG", "WEBP")  # other readers of PIL start programs, or crash on damage
READER = 2  # changes where a file's pixels are read otherwise than before; in the record of a run
MOST_FILE_PIXELS = 2**26  # 8192 x 8192: 67 million
# PIL raises all of these for damaged files: SyntaxError for chunks of a PNG, the others for lengths
# and numbers in headers and metadata
DAMAGE = (
    OSError,
    ValueError,
    SyntaxError,
    ArithmeticError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    MemoryError,
    StructError,
    RecursionError,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
_ORIENTATION_TAG, _SIDEWAYS = 0x0112, (5, 6, 7, 8)  # of EXIF, where width and height change
_ORIENTATION = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")  # already applied


@dataclass(frozen=True)
class Read:
    """Images that were read. `media`: one image [3 h w] in 0..1 per path, None for paths in
    `broken`, which has the reasons.

    `Samples(read.media, ...)` can be scored directly: the missing samples are then unscored.
    """

    media: list[Tensor | None]
    broken: dict[str, str]  # path: a sentence with the path in it


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


def open_image_file(
    path: str | Path, most_pixels: int = MOST_FILE_PIXELS, formats: Formats = FORMATS
) -> Image.Image:
    """The decoded, upright image of a PNG, JPEG or WebP file, with at most `most_pixels`. Its
    colours are as stored: `to_rgb` and `to_tensor` convert them.

    ValueError, one sentence with the path, if the file is missing, empty, too large, damaged or of
    another format, and for a part outside its image. The size is checked before any pixel is
    decoded.
    """
    if match := PIECE.fullmatch(str(path)):
        x, y, width, height = map(int, match.groups()[1:])
        sheet = _sheet(match[1], most_pixels, formats, file_stamp(path))
        return _piece(str(path), sheet, (x, y, x + width, y + height))
    return _read(path, lambda file: _decoded(file, most_pixels, formats), formats)


def open_image_cell(value: Any) -> Image.Image:
    """The image of a table's cell: a path or a part of a file, bytes, the mapping {bytes, path}
    that `datasets` stores, or an image from Python. ValueError for anything else, and for a file
    that `open_image_file` refuses."""
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path")
        if isinstance(data, bytes):
            return open_image_bytes(data, str(path or "bytes"))
        value = path
    if isinstance(value, bytes):
        return open_image_bytes(value, "bytes")
    if isinstance(value, str | Path):
        return open_image_file(value)
    if isinstance(value, Image.Image):
        return value
    raise ValueError(f"{reprlib.repr(value)} is not an image: expected a path, or {{bytes, path}}")


def check_image_file(path: str | Path, most_pixels: int = MOST_FILE_PIXELS) -> None:
    """Raise the errors of `open_image_file` that the file's header shows, without decoding it; a
    sheet with parts is decoded."""
    if PIECE.fullmatch(str(path)):
        open_image_file(path, most_pixels)
    else:
        _read(path, lambda file: opened_image_file(file, most_pixels).close())


def _read(path: str | Path, read: Callable[[IO[bytes]], T], formats: Formats = FORMATS) -> T:
    """Read an image's file; errors are ValueErrors with the path."""
    need(Right.FILES, str(path), path=Path(path))
    try:
        with open_plain(path) as file:
            return read(file)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(f"{in_short(path)}: {absence(str(path))}") from error
    except UnidentifiedImageError as error:
        empty = Path(path).stat().st_size == 0
        wanted = ("PNG, JPEG or WebP", " or ".join(formats))[formats != FORMATS]
        problem = "an empty file" if empty else f"not a {wanted} image"
        if (other := file_unlike_its_name(Path(path))) is not None:
            problem = f"{problem}: it {other}"
        raise ValueError(f"{path}: {problem}") from error
    except DAMAGE as error:
        raise _unreadable(path, error) from error


def open_image_bytes(data: bytes, name: str, most_pixels: int = MOST_FILE_PIXELS) -> Image.Image:
    """Decode an image from bytes, like `open_image_file`; ValueErrors begin with `name`."""
    try:
        return _decoded(BytesIO(data), most_pixels, FORMATS)
    except UnidentifiedImageError as error:
        problem = "not a PNG, JPEG or WebP image" if data else "an empty file"
        if (other := unlike_its_name(name, data[:FIRST_BYTES])) is not None:
            problem = f"{problem}: it {other}"
        raise ValueError(f"{name}: {problem}") from error
    except DAMAGE as error:
        raise _unreadable(name, error) from error


def opened_image_file(
    file: IO[bytes], most_pixels: int = MOST_FILE_PIXELS, formats: Formats = FORMATS
) -> Image.Image:
    """An image of a known format and size, not decoded yet. Raises PIL's errors (DAMAGE), and
    ValueError for more pixels."""
    image = Image.open(file, formats=formats)
    if image.width * image.height > most_pixels:
        raise ValueError(f"{image.width} x {image.height} pixels; the limit is {most_pixels}")
    return image


def _decoded(file: IO[bytes], most_pixels: int, formats: Formats) -> Image.Image:
    with opened_image_file(file, most_pixels, formats) as image:
        upright = ImageOps.exif_transpose(image)
        upright.info = {k: v for k, v in upright.info.items() if k not in _ORIENTATION}
        return upright


def header_size(path: Path, formats: Formats = FORMATS) -> tuple[int, int]:
    """Height and width of the upright image, from its header (TIFF is decoded). Raises PIL's
    errors (DAMAGE)."""
    with open_plain(path) as file, opened_image_file(file, formats=formats) as image:
        if image.format == "TIFF":  # PIL turns it when it is decoded, and some versions its size
            image.load()
        turned = image.getexif().get(_ORIENTATION_TAG) in _SIDEWAYS
        return (image.width, image.height) if turned else (image.height, image.width)


def file_stamp(path: str | Path) -> Stamp | None:
    """Modification time and size of an image's file (for a part, of its sheet), used to notice
    changes. None if the file does not exist: reading it raises the error."""
    match = PIECE.fullmatch(str(path))
    try:
        status = Path(match[1] if match else path).stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size


def _piece(name: str, sheet: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    left, top, right, bottom = box
    if not (left < right <= sheet.width and top < bottom <= sheet.height):
        raise ValueError(
            f"{name}: the part lies outside the image of {sheet.width} x {sheet.height} pixels"
        )
    return sheet.crop(box)


@lru_cache(OPEN_SHEETS)
def _sheet(path: str, most_pixels: int, formats: Formats, stamp: Stamp | None) -> Image.Image:
    """Decode a sheet, once for each `file_stamp`."""
    del stamp
    return open_image_file(path, most_pixels, formats)


# a cell is joined to its table's folder before it is read, which makes one slash of two
_ADDRESS = re.compile(r"(?:^|/)(?:https?|ftp|file|s3|gs|hf):/")
_AS_TEXT = re.compile(r"(?:^|/)data:\w+/")
_SHOWN = 200  # letters of a path in a message; a cell may hold a whole image as a text


def in_short(path: str | Path) -> str:
    """A path for a message, cut where a whole image stands in its place."""
    text = str(path)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def no_path(text: str) -> str | None:
    """Words for a text that stands where a path should; None for a path."""
    if _AS_TEXT.search(text):
        return "an image written as a text: decode it, and store a file or bytes"
    if _ADDRESS.search(text):
        return "an address, and images are read from files: download it"
    return None


def absence(path: str) -> str:
    """Why there is no file of an image at a path, in words that follow it."""
    if not path:
        return "an empty path"
    if (other := no_path(path)) is not None:
        return other
    if Path(path).is_dir():
        return "a folder, not an image"
    sheet, hash_mark, _ = path.rpartition("#")
    if hash_mark and Path(sheet).is_file():
        return "not a part of an image: write #xywh=LEFT,TOP,WIDTH,HEIGHT in pixels, none negative"
    return "no such file"


def _unreadable(path: str | Path, error: BaseException) -> ValueError:
    if (other := no_path(str(path))) is not None:  # too long for the name of a file
        return ValueError(f"{in_short(path)}: {other}")
    number = error.errno if isinstance(error, OSError) else None
    said = str(error) if number is None else os.strerror(number)  # which repeats no path
    reason = " ".join(said.split()) or type(error).__name__
    return ValueError(f"{in_short(path)}: not a readable image ({reason})")
