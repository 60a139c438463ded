"""The format in which samples travel to a reward server: JSON, images in base64.

docs/remote_rewards.md describes it for authors of servers and clients in other languages. Pixels
are sent with 8 bits per channel, so a server sees them rounded to 1/255. Received data is never
executed: there are no pickles, and PIL reads only PNG and WebP, whose sizes are checked before they
are decoded.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from rewards.perception.media import expect, items
from rewards.serving import codec
from rewards.types import RewardScores, Samples

FORMAT = 1


class WireVideo(BaseModel):
    """A video: its frames in order, each as PNG or WebP in base64; or one MP4 in base64."""

    model_config = ConfigDict(extra="forbid")
    frames: list[str] | None = None
    mp4: str | None = None


class WireSamples(BaseModel):
    """n samples. `group` has one id per sample: samples with the same id are compared with each
    other."""

    model_config = ConfigDict(extra="forbid")
    format: Literal[1] = FORMAT
    kind: Literal["image", "video", "text"]
    media: list[str | WireVideo]
    """Images: PNG or WebP in base64. Texts: the texts. Videos: clips."""
    prompts: list[str]
    group: list[Annotated[int, Field(ge=-(2**63), lt=2**63)]]
    meta: list[dict[str, Any]] = Field(default_factory=list)
    """Other columns of the prompt file, as one object per sample; may be empty."""


class WirePairs(WireSamples):
    """Pairs of samples to compare: pair i is sample a[i] against sample b[i]."""

    a: list[int]
    b: list[int]


class ScoreAnswer(BaseModel):
    """One number per sample or pair in `values`; null for a missing score or verdict. `applies` is
    left out unless the reward abstains: it is then false where it does not apply, and null there is
    no failure."""

    model_config = ConfigDict(extra="forbid")
    values: list[float | None]
    applies: list[bool] | None = None

    @classmethod
    def of(cls, scores: RewardScores) -> "ScoreAnswer":
        values = [None if value != value else value for value in scores.values.tolist()]
        everywhere = bool(scores.applies.all())
        return cls(values=values, applies=None if everywhere else scores.applies.tolist())


def encode_samples(
    samples: Samples, pictures: codec.ImageFormat = "png", videos: codec.VideoFormat = "frames"
) -> dict:
    """Encode samples as JSON of `WireSamples`. ValueError for metadata that JSON cannot
    represent."""
    kind = expect(samples, "remote", "image", "video", "text")
    if kind == "text":
        media: list[Any] = items(samples)
    elif kind == "image":
        media = [codec.encode_image(item, pictures) for item in items(samples)]
    else:
        media = [_clip(item, pictures, videos) for item in items(samples)]
    meta = [_plain(row) for row in samples.meta]
    try:
        json.dumps(meta, allow_nan=False)
    except (TypeError, ValueError) as error:
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
    """Decode samples to floats. ValueError names the wrong entry.

    Media are decoded to 8 bits and converted to floats together, so that no sample is held in both
    forms.
    """
    media: list[Any] = []
    for index, entry in enumerate(batch.media):
        with _named_entry(index):
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
    """Number of pixels of all media, from their headers. ValueError for more than `most`.

    Before anything is decoded, it also refuses entries that are not media, and lists whose length
    differs from the prompts'.
    """
    n = len(batch.prompts)
    counts = {"media": len(batch.media), "group": len(batch.group), "meta": len(batch.meta) or n}
    for name, count in counts.items():
        if count != n:
            raise ValueError(f"{n} prompts but {count} {name}; each sample needs one")
    total = 0
    for index, entry in enumerate(batch.media):
        with _named_entry(index):
            total += _header_pixels(entry, batch.kind)
        if total > most:
            raise ValueError(
                f"the media have more than {most} pixels in total; send fewer samples (the setting "
                "batch), or start the server with a larger --pixels"
            )
    return total


@contextmanager
def _named_entry(number: int) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"media[{number}]: {error}") from error


def _header_pixels(entry: str | WireVideo, kind: str) -> int:
    parts = _parts(entry, kind)
    if kind == "text":
        return 0
    if isinstance(parts, str):
        with codec.opened_mp4(parts) as container:
            return codec.announced_pixels(container)
    total = 0
    for part in parts:
        with codec.opened_image(part) as image:
            total += image.width * image.height
    return total


def read_scores(body: Any, count: int) -> RewardScores | None:
    """Scores of an answer; None if the format is wrong or the number of values differs."""
    values = body.get("values") if isinstance(body, dict) else None
    if not isinstance(values, list) or len(values) != count:
        return None
    numbers = [None if value is None else finite_number(value) for value in values]
    value_count = sum(value is not None for value in values)
    if sum(number is not None for number in numbers) != value_count:
        return None
    applies = body.get("applies")
    if applies is None:
        applies = [True] * count
    if not isinstance(applies, list) or len(applies) != count:
        return None
    if not all(isinstance(flag, bool) for flag in applies):
        return None
    if any(
        value is not None and not applied for value, applied in zip(values, applies, strict=True)
    ):
        return None  # a score of a sample to which the reward does not apply
    floats = [math.nan if number is None else number for number in numbers]
    return RewardScores(torch.tensor(floats, dtype=torch.float64), torch.tensor(applies).bool())


def finite_number(value: Any) -> float | None:
    """A JSON number as a float; None for anything else, and for numbers too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return number if math.isfinite(number) else None


def _parts(entry: str | WireVideo, kind: str) -> list[str] | str:
    """The base64 images of an entry; or its text, or its MP4 in base64, as a string."""
    if kind == "video":
        if not isinstance(entry, WireVideo) or (entry.frames is None) == (entry.mp4 is None):
            raise ValueError("a video must be {frames: [...]} or {mp4: ...}")
        if entry.mp4 is not None:
            return entry.mp4
        if not entry.frames:
            raise ValueError("a video without frames")
        return entry.frames
    if not isinstance(entry, str):
        raise ValueError(f"an entry of kind {kind} must be a string")
    return entry if kind == "text" else [entry]


def _item(entry: str | WireVideo, kind: str) -> Any:
    """A text, or the 8-bit pixels of an image [3 h w] or of a video [f 3 h w]."""
    parts = _parts(entry, kind)
    if isinstance(parts, str):
        return parts if kind == "text" else codec.decode_mp4(parts)
    images = [codec.decode_image(part) for part in parts]
    if kind == "image":
        return images[0]
    if len({image.shape for image in images}) > 1:
        raise ValueError("all frames of a video must have the same size")
    return torch.stack(images)


def _clip(frames: Tensor, pictures: codec.ImageFormat, videos: codec.VideoFormat) -> dict[str, Any]:
    if videos == "frames":
        return {"frames": [codec.encode_image(frame, pictures) for frame in frames]}
    return {"mp4": codec.encode_mp4(frames)}


def _plain(value: Any) -> Any:
    """Replace NaN and infinities by None, since a missing cell of a table is NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(part) for part in value]
    return value
