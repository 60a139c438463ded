"""Size of an image as a JPEG file: DDPO's compressibility, arXiv:2305.13301. No weights.

score = sign * bytes / 1000 / unit, at JPEG quality 95. DDPO's incompressibility is `large`; the
compressibility of Flow-GRPO's code is `small` with a `unit` of 500.
"""

import io
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.perception.media import expect, items, to_pil
from rewards.types import Kind, Positive, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image",)

QUALITY = 95


@dataclass(frozen=True)
class JpegSize:
    """Size of the JPEG file in kilobytes (1000 bytes), divided by `unit`."""

    sign: int
    unit: float

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "jpeg", "image")
        sizes = [_bytes(image) / 1000 for image in items(samples)]
        return self.sign * torch.tensor(sizes, dtype=torch.float64) / self.unit

    def examples(self) -> Samples:
        """Noise and a flat image; noise makes the larger file."""
        noise = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        pair = torch.cat([noise, torch.full_like(noise, 0.5)])
        media = pair if self.sign > 0 else pair.flip(0)
        return Samples(media, ["an image"] * 2, torch.zeros(2, dtype=torch.long))


def _bytes(image: Float[Tensor, "3 h w"]) -> int:
    buffer = io.BytesIO()
    to_pil(image).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell()


def load(kind: Literal["large", "small"] = "large", unit: Positive = 1.0) -> Reward:
    """Load the reward.

    kind  large: the score is the size of the file; small: minus that
    unit  kilobytes that count as 1, above 0; Flow-GRPO's is 500
    """
    return JpegSize(1 if kind == "large" else -1, unit)
