"""Animations and videos as frames, chosen by the time at which a player shows them.

A player turns a phone's video as its container says, stretches pixels that are not square, leaves
out what an edit list cuts away, and shows a frame until the next one begins. So does this reader.
Colours follow the stream's matrix and range; 10 and 12 bits stay unrounded; transparent parts
become white. High dynamic range (PQ, HLG) is read as its numbers are, without tone mapping.
"""

import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageSequence
from torch import Tensor
from torch.nn.functional import interpolate

from rewards.perception.files import FORMATS, MOST_FILE_PIXELS, opened_image_file
from rewards.perception.media import to_tensor

T = TypeVar("T")

MEDIA_FORMATS = (*FORMATS, "GIF", "BMP", "TIFF")
_ANIMATED = ("GIF", "PNG", "WEBP")  # several images in other formats are pages or previews
_BROWSER_DELAY = 100  # ms, of a frame whose file has no duration
_ROUNDING = 0.5  # of a frame's duration: times that are nearer to an even rate are rounded
_ONE = 65536  # in the matrix of a video's orientation
MOST_VIDEO_FRAMES = 10**6  # of which the times are listed


def is_video(head: bytes) -> bool:
    """Whether a file's first 12 bytes are those of MP4, MOV, WebM, MKV or AVI."""
    return (
        head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
        or head[:4] == b"\x1a\x45\xdf\xa3"
        or (head[:4] == b"RIFF" and head[8:12] == b"AVI ")
    )


def read_image_or_frames(
    file: IO[bytes], most: int
) -> Float[Tensor, "3 h w"] | Float[Tensor, "f 3 h w"]:
    """Read an image, or at most `most` frames of an animation, in 0..1. Raises PIL's errors
    (`files.DAMAGE`).

    MPO and TIFF files are their first image.
    """
    with opened_image_file(file, MOST_FILE_PIXELS, MEDIA_FORMATS) as image:
        if not is_animation(image):
            return to_tensor(image)
        return torch.stack(animation_frames(image, most, to_tensor))


def animation_frames(image: Image.Image, most: int, convert: Callable[[Image.Image], T]) -> list[T]:
    """At most `most` frames of an open animation, converted; one that stands still is one frame."""
    if not is_animation(image):
        return [convert(image)]
    first = int(bool(image.info.get("default_image")))  # shown where nothing can be animated
    ends = [0.0]
    for frame in ImageSequence.Iterator(image):
        frame.load()  # WebP's durations are known then
        ends.append(ends[-1] + (frame.info.get("duration") or _BROWSER_DELAY))
    starts = [end - ends[first] for end in ends[first:-1]]
    frames = (frame.copy() for frame in ImageSequence.Iterator(image))
    return _picked(frames, frames_in_time(starts, most), convert, first)


def is_animation(image: Image.Image) -> bool:
    """Whether an open image is one of several that a player shows in turn."""
    return image.format in _ANIMATED and getattr(image, "n_frames", 1) > 1


def read_video_frames(file: Path | IO[bytes], most: int) -> Float[Tensor, "f 3 h w"]:
    """Read at most `most` frames of a video, in 0..1. OSError without PyAV, and for a damaged file
    or one without frames."""
    shown = video_frames(file, most, lambda pixels: pixels)
    if len({frame.shape for frame in shown}) > 1:
        raise OSError("its frames differ in size")
    return torch.stack(shown)


def video_frames(
    file: Path | IO[bytes], most: int, convert: Callable[[Float[Tensor, "3 h w"]], T]
) -> list[T]:
    """At most `most` frames of a video, each converted from numbers in 0..1. OSError as
    `read_video_frames` raises it."""
    try:
        import av  # type: ignore[import-not-found]
        from av.error import FFmpegError  # type: ignore[import-not-found]
    except ImportError as error:
        raise OSError("videos need PyAV: pip install 'flowrl[video]'") from error

    def opened() -> Any:  # PyAV's stubs do not tell reading from writing
        if isinstance(file, io.IOBase):
            file.seek(0)
        return av.open(file)

    try:
        with opened() as container:
            starts = [frame.time for frame in _decoded_frames(container)]
        if not starts:
            raise OSError("it has no frames")
        with opened() as container:
            aspect = pixel_aspect(container.streams.best("video"))
            shown = _picked(
                _decoded_frames(container),
                frames_in_time(starts, most),
                lambda frame: convert(shown_frame(frame, aspect)),
            )
    except FFmpegError as error:
        raise OSError(str(error)) from error
    return shown


def _decoded_frames(container: Any) -> Iterator[Any]:
    stream = container.streams.best("video")  # not a cover
    if stream is None:
        raise OSError("it has no video stream")
    for count, frame in enumerate(container.decode(stream)):
        if count == MOST_VIDEO_FRAMES:
            raise OSError(f"it has more than {MOST_VIDEO_FRAMES} frames")
        if frame.width * frame.height > MOST_FILE_PIXELS:
            raise OSError(f"{frame.width} x {frame.height} pixels; the limit is {MOST_FILE_PIXELS}")
        yield frame


def _picked(
    frames: Iterable[Any], at: Sequence[int], convert: Callable[[Any], T], first: int = 0
) -> list[T]:
    """Converted frames at these places, counted from `first`; a place may occur several times."""
    wanted, frames_read = {place + first for place in at}, dict[int, T]()
    for i, frame in enumerate(frames):
        if i in wanted:
            frames_read[i] = convert(frame)
        if len(frames_read) == len(wanted):
            break
    return [frames_read[place + first] for place in at]


def frames_in_time(starts: Sequence[float | None], most: int) -> list[int]:
    """At most `most` frames that are evenly spaced in time, of frames that are first shown at these
    times.

    At an even rate, up to the rounding of times, they are evenly spaced in number too. At a varying
    rate the video is read as at the rate of its shortest interval, where a frame that is shown for
    longer occurs several times.
    """
    count = len(starts)
    times = sorted(time for time in starts if time is not None)
    if len(times) < count or count < 3 or _even(times):
        return sorted(spaced(count, most))
    shortest = min(b - a for a, b in pairwise(times) if b > a)
    ticks = round((times[-1] - times[0]) / shortest) + 1
    inside = shortest * _ROUNDING  # times are rounded: a tick is compared at its middle
    places = sorted(spaced(ticks, most))
    return [bisect_right(times, times[0] + tick * shortest + inside) - 1 for tick in places]


def _even(times: Sequence[float]) -> bool:
    interval = (times[-1] - times[0]) / (len(times) - 1)
    limit = interval * _ROUNDING
    return all(abs(t - times[0] - i * interval) <= limit for i, t in enumerate(times))


def spaced(count: int, most: int) -> set[int]:
    """At most `most` evenly spaced indices below `count`, including both ends (or only the middle
    one)."""
    if count <= most:
        return set(range(count))
    if most == 1:
        return {count // 2}
    return {round(i * (count - 1) / (most - 1)) for i in range(most)}


def pixel_aspect(stream: Any) -> Fraction:
    """Width over height of a video's pixels; 1 where it does not say."""
    return Fraction(stream.sample_aspect_ratio or 1)


def shown_frame(frame: Any, aspect: Fraction = Fraction(1)) -> Float[Tensor, "3 h w"]:
    """A decoded frame (av.VideoFrame) as a player shows it: square pixels, upright, in 0..1.

    The shorter side of a pixel grows, so that nothing is lost.
    """
    pixels = _pixels(frame)
    if aspect != 1:
        height, width = pixels.shape[-2:]
        size = (height, round(width * aspect)) if aspect > 1 else (round(height / aspect), width)
        if size[0] * size[1] > MOST_FILE_PIXELS:
            raise OSError(f"its pixels are {aspect} as wide as high, which cannot be")
        pixels = interpolate(pixels[None], size, mode="bicubic", antialias=True)[0].clamp(0, 1)
    return _upright(pixels, frame.side_data.get("DISPLAYMATRIX"))


def _pixels(frame: Any) -> Tensor:
    parts = frame.format.components
    if any(part.is_alpha for part in parts):
        return to_tensor(Image.fromarray(frame.to_ndarray(format="rgba"), "RGBA"))
    if any(part.bits > 8 for part in parts):
        deep = frame.to_ndarray(format="rgb48le").astype(np.float32) / 65535
        return torch.from_numpy(deep).permute(2, 0, 1)
    return to_tensor(frame.to_image())


def _upright(pixels: Tensor, matrix: Any) -> Tensor:
    """Turn and mirror as the container says: its matrix maps a stored point (x, y) to (a x + c y,
    b x + d y). Turns that are no multiples of 90 degrees count as the nearest one."""
    if matrix is None:
        return pixels
    a, b, _, c, d, *_ = (number / _ONE for number in np.frombuffer(bytes(matrix), np.int32))
    across, down = a, d
    if abs(b) + abs(c) > abs(a) + abs(d):
        pixels, across, down = pixels.transpose(-2, -1), c, b
    turned = [axis for axis, sign in ((-1, across), (-2, down)) if sign < 0]
    return pixels.flip(turned).contiguous()
