"""Mean brightness of an image: no weights, easy to learn, easy to check by eye."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.perception.media import LUMA, each_size, expect
from rewards.types import Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("image", "video")


@dataclass(frozen=True)
class Brightness:
    """Mean luma in 0..1 of images [n 3 h w] or videos [n f 3 h w]; with `sign` -1, darker scores
    higher."""

    sign: int = 1

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "brightness", "image", "video")
        return each_size(samples, self._score)

    def _score(self, samples: Samples) -> Float[Tensor, " n"]:
        return self.differentiable(samples.media.detach().float(), samples).cpu()

    def differentiable(self, media: Tensor, samples: Samples) -> Float[Tensor, " n"]:
        weights = torch.tensor(LUMA, dtype=media.dtype, device=media.device).view(3, 1, 1)
        return self.sign * (media * weights).sum(-3).flatten(1).mean(1)

    def examples(self) -> Samples:
        """A light and a dark gray image, the better one first."""
        light, dark = (0.75, 0.25) if self.sign > 0 else (0.25, 0.75)
        media = torch.tensor([light, dark]).view(2, 1, 1, 1).expand(2, 3, 8, 8)
        return Samples(media, ["an image"] * 2, torch.zeros(2, dtype=torch.long))


def load(kind: Literal["bright", "dark"] = "bright") -> Reward:
    """Load the reward.

    kind  bright: the score is the mean luma, in 0..1; dark: minus that
    """
    return Brightness(1 if kind == "bright" else -1)
