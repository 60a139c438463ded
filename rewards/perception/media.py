"""Conversion of images to tensors and back, and batches whose samples differ in size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image, ImageOps
from torch import Tensor

from rewards.perception.profiles import has_profile, in_srgb
from rewards.types import Kind, Samples

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


class WrongMedia(ValueError):
    """A reward was called with media that it cannot score, such as text instead of images."""


WIDE_MODES = ("I", "I;16", "I;16L", "I;16B", "I;16N")  # PIL's modes of 16 bits a pixel
_APPLIED = (  # what `to_rgb` has applied, under PIL's names
    *("icc_profile", "gamma", "chromaticity", "srgb", "transparency", "background"),
    *("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif"),
)


def expect(samples: Samples, name: str, *kinds: Kind) -> Kind:
    """Return the kind of the media. WrongMedia, naming the reward, unless it is one of `kinds`."""
    if samples.kind not in kinds:
        raise WrongMedia(wrong_kind(name, kinds, samples.kind))
    return samples.kind


def wrong_kind(name: str, kinds: Sequence[Kind], other: Kind) -> str:
    """The sentence on a reward that was given media of another kind than it scores."""
    wanted = " or ".join(plural(kind) for kind in kinds)
    return f"the reward {name!r} scores {wanted}; it was given {plural(other)}"


def plural(kind: Kind) -> str:
    return kind if kind in ("text", "sound") else f"{kind}s"


def items(samples: Samples) -> list[Any]:
    """One tensor (or string) per sample, regardless of how they are stored."""
    return list(samples.media)


def each_size(
    samples: Samples, score: Callable[[Samples], Float[Tensor, " m"]]
) -> Float[Tensor, " n"]:
    """Call `score` once per image size, with media as one tensor."""
    if isinstance(samples.media, Tensor):
        return score(samples)
    scores = torch.full((len(samples.prompts),), torch.nan, dtype=torch.float64)
    for rows, part in by_size(samples):
        scores[rows] = score(part).to(scores)
    return scores


def by_size(samples: Samples) -> Iterator[tuple[list[int], Samples]]:
    """The rows of each image size, and their samples with media as one tensor."""
    if isinstance(samples.media, Tensor):
        yield list(range(len(samples.prompts))), samples
        return
    sizes: dict[tuple[int, ...], list[int]] = {}
    for row, item in enumerate(samples.media):
        sizes.setdefault(tuple(item.shape), []).append(row)
    for rows in sizes.values():
        part = samples.take(rows)
        yield rows, replace(part, media=torch.stack(part.media))


def each_video(
    name: str, samples: Samples, score: Callable[[Float[Tensor, "f 3 h w"]], Tensor], least: int
) -> Float[Tensor, " n"]:
    """Call `score` once per video. WrongMedia for a video with fewer than `least` frames."""
    if not samples.prompts:
        return torch.zeros(0)
    expect(samples, name, "video")
    scores = []
    for video in items(samples):
        if len(video) < least:
            raise WrongMedia(
                f"the reward {name!r} needs at least {least} frames, but a video has {len(video)}"
            )
        scores.append(float(score(video.detach())))
    return torch.tensor(scores, dtype=torch.float64)


def to_pil(pixels: Float[Tensor, "3 h w"]) -> Image.Image:
    """Convert to 8 bits per channel, rounded; values outside 0..1 are clipped and NaN becomes
    black."""
    whole = (pixels.detach().float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(whole.permute(1, 2, 0).cpu().numpy())


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to an upright sRGB image with 8 bits per channel: the reading of every image here
    (the table in docs/pixels.md).

    Gray becomes three equal channels, transparent parts become white, colour profiles are applied.
    The result says nothing more of its colours or orientation. ValueError for pixels that are
    floating-point numbers, whose white is not known.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode in WIDE_MODES:
        return to_pil(_wide(image))
    if image.mode == "F":
        raise ValueError(
            "its pixels are floating-point numbers, whose white is not known: save it with 8 or 16 "
            "bits"
        )
    clear = image.has_transparency_data
    layer = image.convert("RGBA") if clear else image
    # the colours of gray with alpha are gray, as its profile expects
    colours = layer.getchannel("R") if clear and image.mode in ("LA", "La", "L") else layer
    colours.info = {name: value for name, value in image.info.items() if name != "transparency"}
    converted = in_srgb(colours)
    if clear:
        converted = converted.convert("RGBA")
        converted.putalpha(layer.getchannel("A"))
        converted = Image.alpha_composite(
            Image.new("RGBA", converted.size, "white"), converted
        ).convert("RGB")
    converted.info = {name: value for name, value in converted.info.items() if name not in _APPLIED}
    return converted


def to_tensor(image: Image.Image) -> Float[Tensor, "3 h w"]:
    """Convert to floats in 0..1 like `to_rgb`, but without rounding 16-bit gray."""
    if image.mode in WIDE_MODES:
        return _wide(ImageOps.exif_transpose(image))
    image = to_rgb(image)
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1).float() / 255


def _wide(image: Image.Image) -> Float[Tensor, "3 h w"]:
    """Gray of 16 bits, as floats in 0..1. With a profile it is rounded to 8 bits first."""
    import numpy as np

    stored = np.asarray(image)
    gray = torch.from_numpy(stored.astype(np.float32)) / 65535
    if has_profile(image):
        rounded = Image.fromarray((gray.clamp(0, 1) * 255).round().byte().numpy())
        rounded.info = {name: v for name, v in image.info.items() if name != "transparency"}
        colours = to_tensor(rounded)
    else:
        colours = gray.clamp(0, 1).expand(3, -1, -1).clone()
    clear = image.info.get("transparency")
    if isinstance(clear, int):  # of a PNG: this gray is transparent
        colours[:, torch.from_numpy(stored == clear)] = 1.0
    return colours
