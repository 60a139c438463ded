"""Temporal flickering of a video, as VBench measures it (arXiv:2311.17982): no weights.

score = 1 - mean absolute difference of neighbouring frames, of 8-bit colours in 0..1. VBench uses
it for static scenes, and first filters its videos by optical flow; motion lowers the score.

A frozen video has the highest value, 1. As a reward it favours stopping all motion, then low
contrast and blur: give it a small weight, and combine it with a minimum of motion (`motion`).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.perception.media import each_video
from rewards.types import Kind, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("video",)


@dataclass(frozen=True)
class Flicker:
    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        return each_video("flicker", samples, self._score, least=2)

    def _score(self, video: Float[Tensor, "f 3 h w"]) -> Tensor:
        whole = (video.float().clamp(0, 1) * 255).round()
        return 1 - (whole[1:] - whole[:-1]).abs().mean() / 255

    def examples(self) -> Samples:
        """A frozen video and a video of noise."""
        noise = torch.rand(1, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        media = torch.cat([noise[:, :1].expand(-1, 4, -1, -1, -1), noise])
        return Samples(media, ["a video"] * 2, torch.zeros(2, dtype=torch.long))


def load() -> Reward:
    return Flicker()
