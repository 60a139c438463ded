"""Settings that all model-based image rewards share."""

from dataclasses import dataclass

from rewards.perception.embedding import DtypeName, Placement
from rewards.perception.frames import Aggregate, Frames, OverFrames, ScoresImages
from rewards.types import OneOrMore, Reward


@dataclass(frozen=True)
class ImageModelSettings:
    """`rewards.meanings` says what each of them means."""

    frames: Frames = "all"
    aggregate: Aggregate = "mean"
    batch: OneOrMore = 32
    device: str = "auto"
    dtype: DtypeName = "float32"

    @property
    def placement(self) -> Placement:
        return Placement.of(self.device, self.dtype)

    def over_frames(self, name: str, reward: ScoresImages) -> Reward:
        """Apply a reward of images to both images and videos."""
        return OverFrames(reward, name, self.frames, self.aggregate)
