"""Conversion of images to tensors and back, and batches whose samples differ in size."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor

from rewards.types import Kind, Samples

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


class WrongMedia(ValueError):
    """A reward was called with media that it cannot score, such as text instead of images."""


_WIDE = ("I", "I;16", "I;16L", "I;16B", "I;16N")  # PIL's modes of 16 bits a pixel


def expect(samples: Samples, name: str, *kinds: Kind) -> Kind:
    """Return the kind of the media. WrongMedia, naming the reward, unless it is one of `kinds`."""
    if samples.kind not in kinds:
        wanted = " or ".join("text" if kind == "text" else f"{kind}s" for kind in kinds)
        given = "text" if samples.kind == "text" else f"{samples.kind}s"
        raise WrongMedia(f"the reward {name!r} scores {wanted}; it was given {given}")
    return samples.kind


def items(samples: Samples) -> list[Any]:
    """One tensor (or string) per sample, regardless of how they are stored."""
    return list(samples.media)


def each_size(
    samples: Samples, score: Callable[[Samples], Float[Tensor, " m"]]
) -> Float[Tensor, " n"]:
    """Call `score` once per image size, with media as one tensor."""
    if isinstance(samples.media, Tensor):
        return score(samples)
    by_size: dict[tuple[int, ...], list[int]] = {}
    for row, item in enumerate(samples.media):
        by_size.setdefault(tuple(item.shape), []).append(row)
    found = torch.full((len(samples.prompts),), torch.nan, dtype=torch.float64)
    for rows in by_size.values():
        part = samples.take(rows)
        stacked = replace(part, media=torch.stack(part.media))
        found[rows] = score(stacked).to(found)
    return found


def each_video(
    name: str, samples: Samples, score: Callable[[Float[Tensor, "f 3 h w"]], Tensor], least: int
) -> Float[Tensor, " n"]:
    """Call `score` once per video. ValueError for a video with fewer than `least` frames."""
    if not samples.prompts:
        return torch.zeros(0)
    expect(samples, name, "video")
    found = []
    for video in items(samples):
        if len(video) < least:
            raise ValueError(
                f"the reward {name!r} needs at least {least} frames, but a video has {len(video)}"
            )
        found.append(float(score(video.detach())))
    return torch.tensor(found, dtype=torch.float64)


def to_pil(pixels: Float[Tensor, "3 h w"]) -> Image.Image:
    """Convert to 8 bits per channel, rounded; values outside 0..1 are clipped and NaN becomes
    black."""
    whole = (pixels.detach().float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(whole.permute(1, 2, 0).cpu().numpy())


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to an upright image with 8 bits per channel. Gray becomes three equal channels,
    transparent parts become white."""
    image = ImageOps.exif_transpose(image)
    if image.mode in _WIDE:
        return to_pil(_wide(image))
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("RGB")


def to_tensor(image: Image.Image) -> Float[Tensor, "3 h w"]:
    """Convert to floats in 0..1 like `to_rgb`, but without rounding 16-bit gray."""
    if image.mode in _WIDE:
        return _wide(ImageOps.exif_transpose(image))
    image = to_rgb(image)
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1).float() / 255


def _wide(image: Image.Image) -> Float[Tensor, "3 h w"]:
    """Gray of 16 bits, as floats in 0..1."""
    import numpy as np

    gray = torch.from_numpy(np.asarray(image).astype(np.float32)) / 65535
    return gray.clamp(0, 1).expand(3, -1, -1).clone()
