"""The format in which samples travel to a reward server: JSON, images in base64.

docs/remote_rewards.md describes it for authors of servers and clients in other languages. Pixels
travel as 8 bits a channel, so a server sees them rounded to 1/255. Nothing that is received is ever
run: no pickles, and PIL reads only PNG and WebP, whose sizes are bounded before they are decoded.
"""

import base64
import binascii
import importlib.util
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Annotated, Any, Literal

import torch
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from rewards.perception.media import items, to_pil, to_tensor
from rewards.types import Samples

FORMAT = 1
MOST_PIXELS = 2**24  # of one image: 4096 x 4096
FRAMES_PER_SECOND = 8  # an MP4 must have a rate; nothing depends on it

ImageFormat = Literal["png", "webp"]
VideoFormat = Literal["frames", "mp4"]


class WireVideo(BaseModel):
    """A video: its frames in order, each a PNG or WebP in base64; or one MP4 in base64."""

    model_config = ConfigDict(extra="forbid")
    frames: list[str] | None = None
    mp4: str | None = None


class WireSamples(BaseModel):
    """n samples. `group` has an id per sample: samples of one group are to be compared."""

    model_config = ConfigDict(extra="forbid")
    format: Literal[1] = FORMAT
    kind: Literal["image", "video", "text"]
    media: list[str | WireVideo]
    """Images: PNG or WebP in base64. Texts: the texts. Videos: clips."""
    prompts: list[str]
    group: list[Annotated[int, Field(ge=-(2**63), lt=2**63)]]
    meta: list[dict[str, Any]] = Field(default_factory=list)
    """Other columns of the prompt file, an object per sample; or nothing."""


class WirePairs(WireSamples):
    """Samples to be compared: pair i is sample a[i] against sample b[i]."""

    a: list[int]
    b: list[int]


class ScoreAnswer(BaseModel):
    """`values` has a number per sample or pair; null where there is no score or no verdict."""

    model_config = ConfigDict(extra="forbid")
    values: list[float | None]


def encode_samples(
    samples: Samples, pictures: ImageFormat = "png", videos: VideoFormat = "frames"
) -> dict:
    """Samples as the JSON of a `WireSamples`. ValueError for metadata that JSON cannot hold."""
    kind = samples.kind
    if kind == "text":
        media: list[Any] = items(samples)
    elif kind == "image":
        media = [encode_image(item, pictures) for item in items(samples)]
    else:
        media = [_clip(item, pictures, videos) for item in items(samples)]
    meta = [_plain(row) for row in samples.meta]
    try:
        json.dumps(meta)
    except TypeError as error:
        raise ValueError(f"metadata of prompts cannot be sent as JSON: {error}") from error
    return {
        "format": FORMAT,
        "kind": kind,
        "media": media,
        "prompts": list(samples.prompts),
        "group": samples.group.tolist(),
        "meta": meta,
    }


def decode_samples(batch: WireSamples) -> Samples:
    """The samples, as floats. ValueError names the entry that is wrong.

    Media are decoded to 8 bits and become floats together, so that no sample is held in both.
    """
    media: list[Any] = []
    for place, entry in enumerate(batch.media):
        with _named_entry(place):
            media.append(_item(entry, batch.kind))
    whole: Any = media
    if batch.kind != "text":
        if media and len({item.shape for item in media}) == 1:
            whole = torch.stack(media).float().div_(255)
        else:
            whole = [item.float().div_(255) for item in media]
    group = torch.tensor(batch.group, dtype=torch.long)
    return Samples(whole, batch.prompts, group, batch.meta)


def count_pixels(batch: WireSamples, most: int) -> int:
    """The pixels of all media, from their headers. ValueError for more than `most`.

    It also refuses, before anything is decoded, entries that are no media, and lists of other
    lengths than the prompts.
    """
    n = len(batch.prompts)
    counts = {"media": len(batch.media), "group": len(batch.group), "meta": len(batch.meta) or n}
    for name, count in counts.items():
        if count != n:
            raise ValueError(f"{n} prompts but {count} {name}; there must be one per sample")
    total = 0
    for place, entry in enumerate(batch.media):
        with _named_entry(place):
            total += _header_pixels(entry, batch.kind)
        if total > most:
            raise ValueError(
                f"the media have more than {most} pixels in sum; send fewer samples (the setting "
                "batch), or start the server with a larger --pixels"
            )
    return total


@contextmanager
def _named_entry(place: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"media[{place}]: {error}") from error


def _header_pixels(entry: str | WireVideo, kind: str) -> int:
    parts = _parts(entry, kind)
    if kind == "text":
        return 0
    if isinstance(parts, str):
        with _opened_mp4(_bytes(parts)) as container:
            return _announced_pixels(container)
    total = 0
    for part in parts:
        with _opened_image(part) as image:
            total += image.width * image.height
    return total


def encode_image(pixels: Tensor, kind: ImageFormat = "png") -> str:
    """Encode one image [3 h w] in 0..1 as base64 of lossless PNG or WebP."""
    file = io.BytesIO()
    if kind == "png":
        to_pil(pixels).save(file, "PNG", compress_level=1)  # 4 times as fast as 6, 10 % larger
    else:
        to_pil(pixels).save(file, "WEBP", lossless=True, quality=0, method=0)
    return base64.b64encode(file.getvalue()).decode()


def read_answer(body: Any, count: int) -> list[float | None] | None:
    """The values of an answer; None if it is not of the format or has another number of them."""
    values = body.get("values") if isinstance(body, dict) else None
    if not isinstance(values, list) or len(values) != count:
        return None
    numbers = [None if value is None else finite_number(value) for value in values]
    given = sum(value is not None for value in values)
    return numbers if sum(number is not None for number in numbers) == given else None


def finite_number(value: Any) -> float | None:
    """A number of JSON as a float; None for anything else, and for what no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return number if math.isfinite(number) else None


def _parts(entry: str | WireVideo, kind: str) -> list[str] | str:
    """The images of an entry in base64; or a string: its text, or its MP4 in base64."""
    if kind == "video":
        if not isinstance(entry, WireVideo) or (entry.frames is None) == (entry.mp4 is None):
            raise ValueError("a video is {frames: [...]} or {mp4: ...}")
        if entry.mp4 is not None:
            return entry.mp4
        if not entry.frames:
            raise ValueError("a video without frames")
        return entry.frames
    if not isinstance(entry, str):
        raise ValueError(f"an entry of kind {kind} is a string")
    return entry if kind == "text" else [entry]


def _item(entry: str | WireVideo, kind: str) -> Any:
    """A text, or the 8-bit pixels of an image [3 h w] or of a video [f 3 h w]."""
    parts = _parts(entry, kind)
    if isinstance(parts, str):
        return parts if kind == "text" else _from_mp4(_bytes(parts))
    images = [_image(part) for part in parts]
    if kind == "image":
        return images[0]
    if len({image.shape for image in images}) > 1:
        raise ValueError("a video has frames of one size")
    return torch.stack(images)


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def _image(text: str) -> Tensor:
    with _opened_image(text) as image:
        return _bytes_of(image)


def _bytes_of(image: Image.Image) -> Tensor:
    return to_tensor(image).mul_(255).round_().to(torch.uint8)


@contextmanager
def _opened_image(text: str) -> Iterator[Image.Image]:
    """The image with its header read. ValueError for a wrong or damaged one, or a large one."""
    try:
        with Image.open(io.BytesIO(_bytes(text)), formats=("PNG", "WEBP")) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            yield image
    except UnidentifiedImageError as error:
        raise ValueError("neither PNG nor WebP") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"a damaged image ({error})") from error


def _clip(frames: Tensor, pictures: ImageFormat, videos: VideoFormat) -> dict[str, Any]:
    if videos == "frames":
        return {"frames": [encode_image(frame, pictures) for frame in frames]}
    return {"mp4": base64.b64encode(_to_mp4(frames)).decode()}


def _to_mp4(frames: Tensor) -> bytes:
    """H.264 at high quality; lossy, a twentieth of the frames' size."""
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
    return file.getvalue()


def _from_mp4(data: bytes) -> Tensor:
    frames: list[Tensor] = []
    pixels = 0
    with _opened_mp4(data) as container:
        most = _announced_pixels(container)
        for frame in container.decode(video=0):
            pixels += frame.width * frame.height
            if pixels > most:
                raise ValueError("a video of more pixels than its header says")
            frames.append(_bytes_of(frame.to_image()))
    if not frames:
        raise ValueError("a video without frames")
    return torch.stack(frames)


def _announced_pixels(container: Any) -> int:
    stream = container.streams.video[0]
    if stream.frames < 1:
        raise ValueError("an MP4 whose header has no number of frames")
    return stream.width * stream.height * stream.frames


@contextmanager
def _opened_mp4(data: bytes) -> Iterator[Any]:
    av = _av()
    try:
        with av.open(io.BytesIO(data), format="mp4") as container:
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


def _plain(value: Any) -> Any:
    """The value with NaN and infinities as null: a missing cell of a table is NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part) for part in value]
    return value
