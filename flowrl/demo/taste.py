"""Hidden tastes of the demo's simulated person: programs on pixels.

    large  large objects, which is the taste of the demo
    left   objects on the left of the image, which features of prompts hardly tell
    warm   warm colours, whatever the prompt asks for, so it contradicts the reward `shapes`

A fit never sees them: it sees votes, and features of a model that was not made for them. As a
reward, such as `flowrl/demo/taste.py:large`, a taste measures what training on votes has reached.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from rewards.catalogue.shapes import BACKGROUND
from rewards.types import Samples

FAR = 0.25  # distance of a colour from the background's above which a pixel is part of an object


def object_pixels(image: Tensor) -> Bool[Tensor, "h w"]:
    """Pixels of an image [3 h w] in 0..1 that belong to objects."""
    background = torch.tensor(BACKGROUND, dtype=image.dtype)[:, None, None] / 255
    return (image.cpu() - background).norm(dim=0) > FAR


def covered(image: Tensor) -> float:
    """Share of an image that objects cover."""
    return float(object_pixels(image).float().mean())


def leftness(image: Tensor) -> float:
    """Mean place of the pixels of objects: 1 at the left border, 0 at the right one; 1/2 without
    objects."""
    pixels = object_pixels(image)
    if not pixels.any():
        return 0.5
    position = torch.linspace(1, 0, image.shape[2]).expand(pixels.shape)
    return float(position[pixels].mean())


def warmth(image: Tensor) -> float:
    """Mean of red minus blue, in -1..1, over the pixels of objects; 0 without objects."""
    pixels = object_pixels(image)
    if not pixels.any():
        return 0.0
    red, _, blue = image.cpu().float()
    return float((red - blue)[pixels].mean())


def large(samples: Samples) -> list[float]:
    """The taste `large` as a reward."""
    return [covered(image) for image in samples.media]


def left(samples: Samples) -> list[float]:
    """The taste `left` as a reward."""
    return [leftness(image) for image in samples.media]


def warm(samples: Samples) -> list[float]:
    """The taste `warm` as a reward."""
    return [warmth(image) for image in samples.media]


@dataclass(frozen=True)
class PixelTaste:
    """A taste, higher is better, and the person's temperature in it: the difference at which the
    better sample wins 73 % of the votes."""

    of: Callable[[Tensor], float]
    temperature: float


TASTES: Mapping[str, PixelTaste] = {
    "large": PixelTaste(covered, 0.015),
    "left": PixelTaste(leftness, 0.05),
    "warm": PixelTaste(warmth, 0.1),
}
