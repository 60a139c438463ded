"""Draw samples that are tensors as images: points, sounds and paths."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from flowrl.errors import UserError
from flowrl.media.pictures import INK, PALE, PAPER, TILE
from flowrl.media.sounds import wave_image
from rewards import Samples
from rewards.audio import Audio

AXIS_MARGIN, DOT, OTHER = (
    6,
    3,
    1,
)  # pixels: around a drawing, radius of its dot, of the other samples'
MOST_OTHERS, MOST_LINES = 512, 6
AXIS_COLOURS = ((46, 110, 180), (214, 104, 38), (60, 150, 80), (150, 90, 170), (180, 60, 70), INK)


def drawn(samples: Samples, draw: Callable[[Tensor], Image.Image | None]) -> Samples:
    """The same samples with images [3 h w] in place of tensors and of sound alone, whose sound
    stays beside them; other samples unchanged.

    `draw` is the model's own drawing function; if it is missing or returns None, a sample of two
    numbers is a dot among the others, [t 2] a path that ends in a dot, and other tensors are lines
    over their first axis. All images share the same axes, from -m to m, with m a power of two.
    """
    if samples.kind not in ("tensor", "sound") or not len(samples.prompts):
        return samples
    sounds = samples.sounds
    media: Any = [sound.waveform[0].float().cpu() for sound in sounds]
    if not sounds:
        media = torch.as_tensor(samples.media).float().cpu()
    largest = max(float(item.abs().nan_to_num(0.0, 0.0, 0.0).max()) for item in media)
    reach = 2.0 ** math.ceil(math.log2(max(largest, 2.0**-20)))
    images: list[Image.Image] = []
    for item in media:
        drawing = draw(item)
        if drawing is not None and not isinstance(drawing, Image.Image):
            raise UserError(f"image(sample) must return a PIL image, not {type(drawing).__name__}")
        plain = wave_image if samples.kind == "sound" else partial(_plain, all_items=media)
        images.append((drawing or plain(item, reach=reach)).convert("RGB"))
    audio = Audio.padded(sounds) if sounds else None
    return replace(samples, media=[_pixels(image) for image in images], audio=audio)


def _pixels(image: Image.Image) -> Tensor:
    data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return data.view(image.height, image.width, 3).permute(2, 0, 1).float() / 255


def _plain(item: Tensor, *, all_items: Tensor, reach: float) -> Image.Image:
    image = Image.new("RGB", (TILE, TILE), PAPER)
    pen = ImageDraw.Draw(image)
    middle = TILE / 2
    pen.line((AXIS_MARGIN, middle, TILE - AXIS_MARGIN, middle), fill=(225, 225, 220))
    plane = item.shape[-1] == 2
    if plane:
        pen.line((middle, AXIS_MARGIN, middle, TILE - AXIS_MARGIN), fill=(225, 225, 220))
    if plane and item.ndim == 1:
        for other in all_items[:MOST_OTHERS].tolist():
            _dot(pen, _place(other[0], other[1], reach), OTHER, PALE)
        _dot(pen, _place(float(item[0]), float(item[1]), reach), DOT, AXIS_COLOURS[0])
    elif plane:
        path = [_place(x, y, reach) for x, y in item.tolist()]
        pen.line([p for at in path for p in at], fill=PALE)
        _dot(pen, path[-1], DOT, AXIS_COLOURS[0])
    else:
        _lines(pen, item, reach)
    pen.text((AXIS_MARGIN, 0), f"{reach:g}", fill=PALE)
    return image


def _lines(pen: ImageDraw.ImageDraw, item: Tensor, reach: float) -> None:
    columns = item[:, None] if item.ndim == 1 else item[:, :MOST_LINES]
    for column, colour in zip(columns.T.tolist(), AXIS_COLOURS, strict=False):
        last = max(len(column) - 1, 1)
        points = [_place(2 * reach * i / last - reach, y, reach) for i, y in enumerate(column)]
        if len(points) == 1:
            _dot(pen, points[0], DOT, colour)
        pen.line([p for at in points for p in at], fill=colour)


def _place(x: float, y: float, reach: float) -> tuple[float, float]:
    """Pixel of a point; numbers that are not finite are placed in the middle."""
    x, y = (value if math.isfinite(value) else 0.0 for value in (x, y))
    half = TILE / 2 - AXIS_MARGIN
    return TILE / 2 + half * x / reach, TILE / 2 - half * y / reach


def _dot(
    pen: ImageDraw.ImageDraw, at: tuple[float, float], radius: int, colour: tuple[int, int, int]
) -> None:
    x, y = at
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
