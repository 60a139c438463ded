"""Statistics of colour: no weights, easy to learn, easy to check by eye.

All are of RGB in 0..1, over all pixels of an image, or of all frames of a video:

saturation      mean of (max - min) / max over the three channels, HSV's S
contrast        standard deviation of luma (ITU-R BT.601)
colourfulness   sqrt(std(rg)^2 + std(yb)^2) + 0.3 sqrt(mean(rg)^2 + mean(yb)^2), where rg = R - G
                and yb = (R + G) / 2 - B; Hasler and Suesstrunk 2003, whose 0..255 is 255 times ours
hue             share of pixels with S >= 0.25 and max >= 0.2 whose hue is within `width` / 2
                degrees of the wanted colour
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from rewards.perception.media import LUMA, each_size, expect
from rewards.types import Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")

ColourKind = Literal["saturation", "contrast", "colourfulness", "hue"]
HUES = {  # degrees
    "red": 0.0,
    "orange": 30.0,
    "yellow": 60.0,
    "green": 120.0,
    "cyan": 180.0,
    "blue": 240.0,
    "purple": 275.0,
    "magenta": 300.0,
}
LEAST_SATURATION, LEAST_VALUE = 0.25, 0.2  # below, a pixel is gray or black and has no hue
DULL, VIVID = (0.4, 0.5, 0.6), (1.0, 0.0, 0.0)


def saturation(rgb: Float[Tensor, "n 3 p"]) -> Float[Tensor, "n p"]:
    high, low = rgb.amax(1), rgb.amin(1)
    return (high - low) / high.clamp(min=1e-6)


def contrast(rgb: Float[Tensor, "n 3 p"]) -> Float[Tensor, " n"]:
    return (rgb * rgb.new_tensor(LUMA)[:, None]).sum(1).std(1, correction=0)


def colourfulness(rgb: Float[Tensor, "n 3 p"]) -> Float[Tensor, " n"]:
    red, green, blue = rgb.unbind(1)
    rg, yb = red - green, (red + green) / 2 - blue
    spread = rg.std(1, correction=0).hypot(yb.std(1, correction=0))
    return spread + 0.3 * rg.mean(1).hypot(yb.mean(1))


def hue(rgb: Float[Tensor, "n 3 p"]) -> Float[Tensor, "n p"]:
    """Hue in degrees: 0 is red, 120 is green; grays have 0."""
    red, green, blue = rgb.unbind(1)
    high, low = rgb.amax(1), rgb.amin(1)
    span = (high - low).clamp(min=1e-6)
    of_red, of_green = (green - blue) / span % 6, (blue - red) / span + 2
    of_blue = (red - green) / span + 4
    sector = torch.where(high == red, of_red, torch.where(high == green, of_green, of_blue))
    return sector * 60 * (high > low)


@dataclass(frozen=True)
class Colour:
    kind: ColourKind
    sign: int
    hue: float  # degrees
    width: float

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "colour", "image", "video")
        with torch.no_grad():
            return self.sign * each_size(samples, self._score)

    def _score(self, samples: Samples) -> Float[Tensor, " n"]:
        media = samples.media.float().clamp(0, 1)
        rgb = media.movedim(-3, 1).flatten(2).cpu()  # frames and pixels are all pixels
        if self.kind == "saturation":
            return saturation(rgb).mean(1)
        if self.kind == "contrast":
            return contrast(rgb)
        if self.kind == "colourfulness":
            return colourfulness(rgb)
        distance = ((hue(rgb) - self.hue + 180) % 360 - 180).abs()
        coloured = (saturation(rgb) >= LEAST_SATURATION) & (rgb.amax(1) >= LEAST_VALUE)
        return ((distance <= self.width / 2) & coloured).float().mean(1)

    def examples(self) -> Samples:
        """A half vivid image (of the wanted hue, for `hue`) and a dull one, the better one
        first."""
        flat = torch.tensor(DULL).view(3, 1, 1).expand(3, 16, 16)
        vivid = flat.clone()
        vivid[:, :, :8] = torch.tensor(VIVID if self.kind != "hue" else _pure(self.hue))[
            :, None, None
        ]
        pair = [vivid, flat] if self.sign > 0 else [flat, vivid]
        return Samples(torch.stack(pair), ["an image"] * 2, torch.zeros(2, dtype=torch.long))


def _pure(degrees: float) -> tuple[float, float, float]:
    import colorsys

    return colorsys.hsv_to_rgb(degrees % 360 / 360, 1.0, 1.0)


def load(
    kind: ColourKind = "saturation",
    more: bool = True,
    hue: str | float = "red",
    width: Annotated[float, Field(gt=0, le=360)] = 40.0,
) -> Reward:
    """Load the reward.

    kind   statistic that is the score, by the formulas above
    more   whether higher values score higher; false: the score is minus the statistic
    hue    wanted colour of `kind: hue`: red, orange, yellow, green, cyan, blue, purple or magenta,
           or any number of degrees, where 0 is red and 120 green; no effect with another kind
    width  width in degrees, in (0, 360], of the range of hues that count as that colour; larger
           accepts more; no effect with another kind
    """
    if isinstance(hue, str) and hue not in HUES:
        raise ValueError(f"colour: hue must be degrees or one of {', '.join(HUES)}, not {hue!r}")
    degrees = HUES[hue] if isinstance(hue, str) else float(hue)
    return Colour(kind, 1 if more else -1, degrees, width)
