"""Amount of motion in a video, after VBench's dynamic degree (arXiv:2311.17982): no weights.

Between frames at a distance of `every`, the largest 5 % of motions are averaged and divided by
6/256 of the shorter side, VBench's threshold between still and moving.

* `kind: amount` is the mean over the pairs, at most `most`: continuous, and therefore suitable for
training;
* `kind: vote` is VBench's rule: 1 if at least round(4 n / 16) of the pairs move, with n compared
  frames. At least one pair must move; in VBench's code a video of two frames needs none.

VBench measures motion with RAFT, at about 8 frames per second. Here block matching replaces RAFT
(`rewards.perception.motion`), with whole-pixel motion at 128 pixels, up to 1/16 of the shorter
side. So its figures cannot be compared with VBench's.

It rewards any change that blocks can follow: camera shake, jumps, crawling textures, noise. Cap it
with `most`, and combine it with `smoothness` or `flicker`, which penalise exactly these.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.perception.media import each_video
from rewards.perception.motion import block_motion, reduced_luma
from rewards.types import Kind, OneOrMore, Positive, Reward, Samples

SCORED_KINDS: tuple[Kind, ...] = ("video",)

LARGEST_SHARE = 0.05
THRESHOLD = 6 / 256  # of the shorter side


@dataclass(frozen=True)
class Motion:
    vote: bool
    every: int
    most: float

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        return each_video("motion", samples, self._score, least=self.every + 1)

    def _score(self, video: Float[Tensor, "f 3 h w"]) -> Tensor:
        luma = reduced_luma(video[:: self.every])
        length = block_motion(luma[:-1], luma[1:]).norm(dim=-1)
        count = max(1, int(LARGEST_SHARE * length.shape[1]))
        largest = length.topk(count).values.mean(1)
        amount = largest / (THRESHOLD * min(luma.shape[-2:]))
        if self.vote:
            return ((amount > 1).sum() >= max(1, round(4 * len(luma) / 16))).float()
        return amount.clamp(max=self.most).mean()

    def examples(self) -> Samples:
        """A texture that moves by 3 of 48 pixels, and the same texture at rest."""
        texture = torch.rand(3, 48, 160, generator=torch.Generator().manual_seed(0))
        frames = 4 * self.every + 1
        starts = [3 * (i // self.every) for i in range(frames)]
        moving = torch.stack([texture[:, :, start : start + 48] for start in starts])
        media = torch.stack([moving, moving[:1].expand(frames, -1, -1, -1)])
        return Samples(media, ["a video"] * 2, torch.zeros(2, dtype=torch.long))


def load(
    kind: Literal["amount", "vote"] = "amount", every: OneOrMore = 1, most: Positive = 4.0
) -> Reward:
    """Load the reward.

    kind   amount: continuous, for training; vote: VBench's rule, 1 for a video that moves,
           otherwise 0
    every  distance between the frames that are compared, in frames, at least 1
    most   most that one pair of frames can add, in multiples of VBench's threshold between still
           and moving, above 0; no effect with vote
    """
    return Motion(kind == "vote", every, most)
