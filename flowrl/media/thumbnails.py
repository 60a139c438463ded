"""Small copies of samples as data URLs, for pages that open without other files."""

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from flowrl.media.pictures import to_image

LOSSLESS = 96  # pixels of the longer side up to which a copy is a PNG of the very pixels
MOST_FRAMES = 12  # of a video, evenly spread
THUMBNAIL_QUALITY = 82  # of JPEG


class Thumbnail(NamedTuple):
    """A small copy: an image, or the frames of a video side by side."""

    url: str
    width: int  # of one frame, in pixels
    height: int
    frames: int = 1


def small_copy(media: Tensor, largest: int) -> Thumbnail:
    """Copy an image [3 h w] or a video [f 3 h w] in 0..1, at most `largest` pixels on a side."""
    if media.ndim == 3:
        return _joined([_small(to_image(media), largest)])
    count = min(len(media), MOST_FRAMES)
    indices = [round(i * (len(media) - 1) / max(1, count - 1)) for i in range(count)]
    return _joined([_small(to_image(media[at]), largest) for at in indices])


def _small(image: Image.Image, largest: int) -> Image.Image:
    longest = max(image.size)
    if longest <= largest:
        return image
    width, height = (max(1, round(side * largest / longest)) for side in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _joined(frames: Sequence[Image.Image]) -> Thumbnail:
    width, height = frames[0].size
    strip = Image.new("RGB", (width * len(frames), height))
    for i, frame in enumerate(frames):
        strip.paste(frame, (i * width, 0))
    kind = "PNG" if max(width, height) <= LOSSLESS else "JPEG"
    store = io.BytesIO()
    strip.save(
        store, kind, **({"optimize": True} if kind == "PNG" else {"quality": THUMBNAIL_QUALITY})
    )
    code = base64.b64encode(store.getvalue()).decode()
    return Thumbnail(f"data:image/{kind.lower()};base64,{code}", width, height, len(frames))
