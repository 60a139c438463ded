"""Mean brightness of a picture: no weights, easy to learn, easy to check by eye."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.types import Reward, Samples

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(frozen=True)
class Brightness:
    """Mean luma in 0..1 of images [n 3 h w] or videos [n f 3 h w]; `sign` -1 asks for dark ones."""

    sign: int = 1

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        media = samples.media.float()
        weights = torch.tensor(LUMA, device=media.device).view(3, 1, 1)
        return self.sign * (media * weights).sum(-3).flatten(1).mean(1).cpu()


def load(kind: Literal["bright", "dark"] = "bright") -> Reward:
    if kind not in ("bright", "dark"):
        raise ValueError(f"brightness: kind is bright or dark, not {kind!r}")
    return Brightness(1 if kind == "bright" else -1)
