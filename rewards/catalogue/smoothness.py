"""Smoothness of a video's motion: how well each odd frame is predicted by its two neighbours.

VBench's motion smoothness (arXiv:2311.17982) drops the odd frames, lets the network AMT-S
interpolate them, and scores 1 - mean absolute difference. Here block matching
(`rewards.perception.motion`) replaces the network, so figures differ from VBench's:

* `kind: compensated` moves blocks of both neighbours half-way, on luma at 128 pixels;
* `kind: mean` takes the mean of the two neighbours at full size: a lower bound that falls with
speed.

Needs 3 frames. A frozen video has the highest value, 1; the reward also favours blur, slow motion
and uniform areas, in which any motion fits. Use it together with `motion`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.perception.media import each_video
from rewards.perception.motion import middle_error, reduced_luma
from rewards.types import Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("video",)

SmoothnessKind = Literal["compensated", "mean"]


@dataclass(frozen=True)
class Smoothness:
    kind: SmoothnessKind

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        return each_video("smoothness", samples, self._score, least=3)

    def _score(self, video: Float[Tensor, "f 3 h w"]) -> Tensor:
        if self.kind == "compensated":
            luma = reduced_luma(video)
            last = (len(luma) - 1) // 2 * 2
            return 1 - middle_error(luma[0:last:2], luma[1:last:2], luma[2 : last + 1 : 2]).mean()
        whole = (video.float().clamp(0, 1) * 255).round() / 255
        last = (len(whole) - 1) // 2 * 2
        between = (whole[0:last:2] + whole[2 : last + 1 : 2]) / 2
        return 1 - (between - whole[1:last:2]).abs().mean()

    def examples(self) -> Samples:
        """A texture that moves in equal steps, and noise."""
        rng = torch.Generator().manual_seed(0)
        texture = torch.rand(3, 48, 80, generator=rng)
        moving = torch.stack([texture[:, :, 2 * i : 2 * i + 48] for i in range(5)])
        media = torch.stack([moving, torch.rand(5, 3, 48, 48, generator=rng)])
        if self.kind == "mean":
            media = torch.stack([moving[:1].expand(5, -1, -1, -1), media[1]])
        return Samples(media, ["a video"] * 2, torch.zeros(2, dtype=torch.long))


def load(kind: SmoothnessKind = "compensated") -> Reward:
    """Load the reward.

    kind  prediction of an odd frame: compensated moves blocks of its neighbours half-way, mean is
          their mean, which falls with speed
    """
    return Smoothness(kind)
