"""The preprocessing of image models on float tensors, so that gradients reach the pixels.

The published processors pass through PIL in 8 bits. Here images stay floats, are resized by torch
with antialiasing, and clipped to 0..1 like 8-bit images. Scores differ by the rounding to 8 bits,
which the gradient test measures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

Fit = Literal["shorter", "longer", "both"]
_FILTERS: dict[int, Literal["bilinear", "bicubic"]] = {2: "bilinear", 3: "bicubic"}  # PIL's numbers


@dataclass(frozen=True)
class PixelPreparation:
    """Resizes, crops or pads images [n 3 h w] to `size` and normalises their colours.

    fit      the side that is resized to `size`: the shorter one, followed by a centre crop; the
             longer one, followed by black padding; or both, which ignores the aspect ratio
    resized  the length of that side, if it differs from `size`
    clipped  whether colours outside 0..1, which resizing creates at sharp edges, are clipped as in
             PIL
    rounded  whether the crop's offset is rounded to the nearest pixel (torchvision, ImageReward) or
             down
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: Fit = "shorter"
    resized: int | None = None
    mode: Literal["bilinear", "bicubic"] = "bicubic"
    clipped: bool = True
    rounded: bool = False

    @classmethod
    def of(cls, processor: Any) -> "PixelPreparation":
        """Copy the steps of a transformers image processor. ValueError if it has any other step."""
        steps = ("do_resize", "do_rescale", "do_normalize")
        wanted, crop, size = processor.resample, processor.crop_size, processor.size
        supported = all(getattr(processor, step) for step in steps) and int(wanted) in _FILTERS
        if not supported or abs(processor.rescale_factor * 255 - 1) > 1e-6:
            raise ValueError(
                f"{type(processor).__name__} has steps without a gradient here: it may only "
                "resize (bilinear or bicubic), divide by 255 and normalise"
            )
        edge = size.get("shortest_edge")
        whole = (size.get("height"), size.get("width")) if edge is None else (edge, edge)
        cut = (crop["height"], crop["width"]) if processor.do_center_crop else whole
        return cls(
            size=cut,
            mean=tuple(processor.image_mean),
            std=tuple(processor.image_std),
            fit="both" if edge is None else "shorter",
            resized=edge,
            mode=_FILTERS[int(wanted)],
        )

    def __call__(self, media: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 3 s t"]:
        shape = self._resized(media.shape[-2], media.shape[-1])
        passes = [(media.shape[-2], shape[1]), shape] if self.clipped else [shape]
        for between in passes:  # PIL resizes the width first, and clips after each pass
            if between != tuple(media.shape[-2:]):
                media = functional.interpolate(media, between, mode=self.mode, antialias=True)
            media = media.clamp(0, 1) if self.clipped else media
        above, left = (self._edge(want - have) for want, have in zip(self.size, shape, strict=True))
        below, right = (
            want - have - edge
            for want, have, edge in zip(self.size, shape, (above, left), strict=True)
        )
        media = functional.pad(media, (left, right, above, below))
        return standardised(media, self.mean, self.std)

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if self.fit == "both":
            return self.size
        if self.fit == "longer":
            side = max(self.size)
            return round(height * side / max(height, width)), round(
                width * side / max(height, width)
            )
        side, least = self.resized or min(self.size), min(height, width)
        return int(side * height / least), int(side * width / least)

    def _edge(self, room: int) -> int:
        """Number of pixels that are added before the image; a negative number is cut off."""
        if room >= 0:
            return room // 2
        return -round(-room / 2) if self.rounded else -(-room // 2)


def standardised(
    pixels: Float[Tensor, "*n 3 h w"], mean: Sequence[float], std: Sequence[float]
) -> Float[Tensor, "*n 3 h w"]:
    """Subtract each channel's mean and divide by its standard deviation."""
    centre, spread = (
        torch.tensor(values, dtype=pixels.dtype, device=pixels.device).view(3, 1, 1)
        for values in (mean, std)
    )
    return (pixels - centre) / spread
