"""The format in which samples travel to a reward server: JSON, pictures in base64.

docs/remote_rewards.md describes it for those who write a server or a client in another language.
Pixels travel as 8 bits a channel, so a server sees them rounded to 1/255. Nothing that is received
is ever run: no pickles, and PIL is only asked for PNG and WebP, of sane sizes.
"""

import base64
import binascii
import importlib.util
import io
import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import torch
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from rewards.perception.media import items, to_pil, to_tensor
from rewards.types import Samples

FORMAT = 1
MOST_PIXELS = 2**26  # of one picture: 8192 x 8192
FRAMES_A_SECOND = 8  # an MP4 must say some rate; nothing depends on it

Pictures = Literal["png", "webp"]
Videos = Literal["frames", "mp4"]


class WireVideo(BaseModel):
    """A video: its frames in order, each a PNG or WebP in base64; or one MP4 in base64."""

    model_config = ConfigDict(extra="forbid")
    frames: list[str] | None = None
    mp4: str | None = None


class WireSamples(BaseModel):
    """n samples. `group` has an id a sample: samples of one group are to be compared."""

    model_config = ConfigDict(extra="forbid")
    format: Literal[1] = FORMAT
    kind: Literal["image", "video", "text"]
    media: list[str | WireVideo]
    """Images: PNG or WebP in base64. Texts: the texts. Videos: clips."""
    prompts: list[str]
    group: list[int]
    meta: list[dict[str, Any]] = Field(default_factory=list)
    """Other columns of the prompt file, an object a sample; or nothing."""


class WirePairs(WireSamples):
    """Samples to be compared: pair i is sample a[i] against sample b[i]."""

    a: list[int]
    b: list[int]


class ScoreAnswer(BaseModel):
    """`values` has a number a sample or a pair; null where there is no score or no verdict."""

    model_config = ConfigDict(extra="forbid")
    values: list[float | None]


def encode_samples(samples: Samples, pictures: Pictures = "png", videos: Videos = "frames") -> dict:
    """A `WireSamples` as JSON's types. ValueError for metadata that JSON cannot hold."""
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
    """ValueError says which entry is wrong."""
    media: list[Any] = []
    for place, entry in enumerate(batch.media):
        try:
            media.append(_item(entry, batch.kind))
        except ValueError as error:
            raise ValueError(f"media[{place}]: {error}") from error
    whole: Any = media
    if media and batch.kind != "text" and len({item.shape for item in media}) == 1:
        whole = torch.stack(media)
    group = torch.tensor(batch.group, dtype=torch.long)
    return Samples(whole, batch.prompts, group, batch.meta)


def encode_image(pixels: Tensor, kind: Pictures = "png") -> str:
    """One image [3 h w] in 0..1 as base64 of lossless PNG or WebP."""
    file = io.BytesIO()
    if kind == "png":
        to_pil(pixels).save(file, "PNG", compress_level=1)  # 4 times as fast as 6, 10 % larger
    else:
        to_pil(pixels).save(file, "WEBP", lossless=True, quality=0, method=0)
    return base64.b64encode(file.getvalue()).decode()


def read_answer(body: Any, count: int) -> list[float | None] | None:
    """The values of an answer; None if it is not of the format or of another number."""
    values = body.get("values") if isinstance(body, dict) else None
    if not isinstance(values, list) or len(values) != count:
        return None
    fine = all(v is None or (_is_number(v) and math.isfinite(v)) for v in values)
    return [None if v is None else float(v) for v in values] if fine else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _item(entry: str | WireVideo, kind: str) -> Any:
    if kind == "video":
        if not isinstance(entry, WireVideo) or (entry.frames is None) == (entry.mp4 is None):
            raise ValueError("a video is {frames: [...]} or {mp4: ...}")
        if entry.mp4 is not None:
            return _from_mp4(_bytes(entry.mp4))
        frames = [_image(frame) for frame in entry.frames or ()]
        if not frames or len({frame.shape for frame in frames}) > 1:
            raise ValueError("a video has one frame or more, all of one size")
        return torch.stack(frames)
    if not isinstance(entry, str):
        raise ValueError(f"an entry of kind {kind} is a string")
    return entry if kind == "text" else _image(entry)


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error


def _image(text: str) -> Tensor:
    try:
        with Image.open(io.BytesIO(_bytes(text)), formats=("PNG", "WEBP")) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            return to_tensor(image)
    except UnidentifiedImageError as error:
        raise ValueError("neither PNG nor WebP") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"a damaged picture ({error})") from error


def _clip(frames: Tensor, pictures: Pictures, videos: Videos) -> dict[str, Any]:
    if videos == "frames":
        return {"frames": [encode_image(frame, pictures) for frame in frames]}
    return {"mp4": base64.b64encode(_to_mp4(frames)).decode()}


def _to_mp4(frames: Tensor) -> bytes:
    """H.264 at high quality; lossy, a twentieth of the frames' size."""
    av = _av()
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", FRAMES_A_SECOND, options={"crf": "12"})
        stream.height, stream.width = frames.shape[-2:]
        stream.pix_fmt = "yuv444p"  # takes odd sizes, and keeps colours sharp
        stream.time_base = Fraction(1, FRAMES_A_SECOND)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(to_pil(frame))))
        container.mux(stream.encode(None))
    return file.getvalue()


def _from_mp4(data: bytes) -> Tensor:
    av = _av()
    frames: list[Tensor] = []
    pixels = 0
    try:
        with av.open(io.BytesIO(data), format="mp4") as container:
            for frame in container.decode(video=0):
                pixels += frame.width * frame.height
                if pixels > MOST_PIXELS:
                    raise ValueError("a video of too many pixels")
                frames.append(to_tensor(frame.to_image()))
    except av.error.FFmpegError as error:
        raise ValueError(f"a damaged video ({error})") from error
    if not frames:
        raise ValueError("a video without frames")
    return torch.stack(frames)


def _av() -> Any:
    if importlib.util.find_spec("av") is None:
        raise ValueError("MP4 needs the library av: pip install 'flowrl[video]', or send frames")
    import av  # pyright: ignore[reportMissingImports]

    return av


def _plain(value: Any) -> Any:
    """Numbers that JSON does not know (a missing cell of a table is NaN) become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part) for part in value]
    return value
