"""Video files that models are given: MP4, MOV, WebM, MKV and AVI, and animations, as their frames.

What a frame's pixels are, `moving` says; like images that models are given, they have 8 bits.
"""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import IO, TypeVar

from PIL import Image, UnidentifiedImageError
from torch import Tensor

from rewards.perception.contents import FIRST_BYTES, file_unlike_its_name, open_plain
from rewards.perception.files import DAMAGE, MOST_FILE_PIXELS, opened_image_file
from rewards.perception.media import to_pil, to_rgb
from rewards.perception.moving import (
    MEDIA_FORMATS,
    MOST_VIDEO_FRAMES,
    animation_frames,
    is_animation,
    is_video,
    video_frames,
)
from rewards.rights import Right, need

MOST_VIDEO_PIXELS = 2**29  # of all frames that are kept: 1.5 GiB, 582 frames of 1280 x 720
T = TypeVar("T")


def moves(source: str | bytes) -> bool:
    """Whether a file, or the bytes of one, is a video or an animation. False for one that is
    missing or damaged: who reads it as an image says why."""
    try:
        if isinstance(source, bytes):
            return _moves(BytesIO(source))
        need(Right.FILES, source, path=Path(source))
        with open_plain(source) as file:
            return _moves(file)
    except DAMAGE:
        return False


def open_video_file(path: str | Path, most: int | None = None) -> list[Image.Image]:
    """The frames of a video's file, evenly spaced in time if there are more than `most`.

    ValueError, one sentence with the path, for a file that is missing or damaged, for one whose
    frames differ in size, and for more than 2^29 pixels in all of them.
    """
    need(Right.FILES, str(path), path=Path(path))
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with open_plain(path) as file:
            return _frames(file, most)
    except UnidentifiedImageError as error:
        other = file_unlike_its_name(Path(path))
        problem = "no video of a known form" if other is None else f"it {other}"
        raise ValueError(f"{path}: {problem}") from error
    except DAMAGE as error:
        raise _unreadable(str(path), error) from error


def open_video_bytes(data: bytes, name: str, most: int | None = None) -> list[Image.Image]:
    """The same of a file's bytes, which messages name so."""
    try:
        return _frames(BytesIO(data), most)
    except UnidentifiedImageError as error:
        raise ValueError(f"{name}: no video of a known form") from error
    except DAMAGE as error:
        raise _unreadable(name, error) from error


def _moves(file: IO[bytes]) -> bool:
    if is_video(file.read(FIRST_BYTES)):
        return True
    file.seek(0)
    with opened_image_file(file, MOST_FILE_PIXELS, MEDIA_FORMATS) as image:
        return is_animation(image)


def _frames(file: IO[bytes], most: int | None) -> list[Image.Image]:
    counted = most or MOST_VIDEO_FRAMES
    head = file.read(FIRST_BYTES)
    file.seek(0)
    if is_video(head):
        frames = video_frames(file, counted, _bounded(to_pil))
    else:
        with opened_image_file(file, MOST_FILE_PIXELS, MEDIA_FORMATS) as image:
            frames = animation_frames(image, counted, _bounded(to_rgb))
    if len({frame.size for frame in frames}) > 1:
        raise OSError("its frames differ in size")
    return frames


def _bounded(convert: Callable[[T], Image.Image]) -> Callable[[T], Image.Image]:
    """`convert` until its images have too many pixels together."""
    pixels = 0

    def converted(frame: T) -> Image.Image:
        nonlocal pixels
        width, height = frame.size if isinstance(frame, Image.Image) else _size(frame)
        pixels += width * height
        if pixels > MOST_VIDEO_PIXELS:
            raise OSError(
                f"its frames of {width} x {height} have more than {MOST_VIDEO_PIXELS} pixels "
                "together: cut it shorter, make it smaller, or set num_frames"
            )
        return convert(frame)

    return converted


def _size(frame: object) -> tuple[int, int]:
    assert isinstance(frame, Tensor), "a decoded frame [3 h w]"
    return frame.shape[-1], frame.shape[-2]


def _unreadable(name: str, error: BaseException) -> ValueError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"{name}: not a readable video ({reason})")
