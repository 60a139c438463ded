"""Encode images and videos as base64 text, and decode them to 8-bit pixels.

PIL reads only PNG and WebP here, and sizes are read from headers before anything is decoded.
"""

import base64
import binascii
import importlib.util
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, Literal

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from rewards.perception.media import to_pil, to_tensor
from rewards.perception.moving import pixel_aspect, shown_frame

MOST_PIXELS = 2**24  # of one image: 4096 x 4096
FRAMES_PER_SECOND = 8  # an MP4 must have a rate; nothing depends on it

ImageFormat = Literal["png", "webp"]
VideoFormat = Literal["frames", "mp4"]


def encode_image(pixels: Tensor, kind: ImageFormat = "png") -> str:
    """Encode one image [3 h w] in 0..1 as base64 of lossless PNG or WebP."""
    file = io.BytesIO()
    if kind == "png":
        to_pil(pixels).save(file, "PNG", compress_level=1)  # 4 times as fast as 6, 10 % larger
    else:
        to_pil(pixels).save(file, "WEBP", lossless=True, quality=0, method=0)
    return base64.b64encode(file.getvalue()).decode()


def encode_jpeg(pixels: Tensor, quality: int) -> str:
    """Encode one image [3 h w] in 0..1 as base64 of JPEG, for models that expect JPEG."""
    file = io.BytesIO()
    to_pil(pixels).save(file, "JPEG", quality=quality)
    return base64.b64encode(file.getvalue()).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def decode_image(text: str) -> Tensor:
    """Decode an image to 8-bit pixels [3 h w]. ValueError if it is damaged or too large."""
    with opened_image(text) as image:
        return _rounded(to_tensor(image))


def _rounded(pixels: Tensor) -> Tensor:
    return pixels.mul_(255).round_().to(torch.uint8)


@contextmanager
def opened_image(text: str) -> Iterator[Image.Image]:
    """Open an image and read its header. ValueError for a wrong, damaged or too large image."""
    try:
        with Image.open(io.BytesIO(_bytes(text)), formats=("PNG", "WEBP")) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"an image of {image.width} x {image.height} pixels is too large")
            yield image
    except UnidentifiedImageError as error:
        raise ValueError("neither PNG nor WebP") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"a damaged image ({error})") from error


def encode_mp4(frames: Tensor) -> str:
    """Encode a video [f 3 h w] as base64 of H.264, which is lossy and about a twentieth of the
    frames' size."""
    av = _av()
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", FRAMES_PER_SECOND, options={"crf": "12"})
        stream.height, stream.width = frames.shape[-2:]
        stream.pix_fmt = "yuv444p"  # takes odd sizes, and keeps colours sharp
        stream.time_base = Fraction(1, FRAMES_PER_SECOND)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(to_pil(frame))))
        container.mux(stream.encode(None))
    return base64.b64encode(file.getvalue()).decode()


def decode_mp4(text: str) -> Tensor:
    """Decode a video to 8-bit pixels [f 3 h w]. ValueError if it is damaged."""
    frames: list[Tensor] = []
    pixels = Fraction(0)
    with opened_mp4(text) as container:
        most = announced_pixels(container)
        aspect = pixel_aspect(container.streams.video[0])
        for frame in container.decode(video=0):
            pixels += frame.width * frame.height * max(aspect, 1 / aspect)
            if pixels > most:
                raise ValueError("a video with more pixels than its header states")
            try:
                frames.append(_rounded(shown_frame(frame, aspect)))
            except OSError as error:
                raise ValueError(f"a damaged video ({error})") from error
    if not frames:
        raise ValueError("a video without frames")
    return torch.stack(frames)


def announced_pixels(container: Any) -> int:
    """Number of square pixels of all frames, from an MP4's header."""
    stream = container.streams.video[0]
    if stream.frames < 1:
        raise ValueError("an MP4 whose header does not state the number of frames")
    aspect = pixel_aspect(stream)
    return math.ceil(stream.width * stream.height * stream.frames * max(aspect, 1 / aspect))


@contextmanager
def opened_mp4(text: str) -> Iterator[Any]:
    """Open an MP4 and read its header. ValueError if it is damaged."""
    av = _av()
    try:
        with av.open(io.BytesIO(_bytes(text)), format="mp4") as container:
            if not container.streams.video:
                raise ValueError("a video without frames")
            yield container
    except av.error.FFmpegError as error:
        raise ValueError(f"a damaged video ({error})") from error


def _av() -> Any:
    if importlib.util.find_spec("av") is None:
        raise ValueError("MP4 needs the library av: pip install 'flowrl[video]', or send frames")
    import av  # pyright: ignore[reportMissingImports]

    return av
