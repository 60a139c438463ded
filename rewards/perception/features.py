"""Features: the numbers behind a reward's score, on which a head can be fitted to votes.

A reward of the catalogue offers them by `features`. Its score need not be linear in them. A
`FeatureModel` has features alone.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.perception.frames import Frames, OverFrames, frame_indices
from rewards.perception.media import expect, items
from rewards.types import Kind, Reward, Samples


@runtime_checkable
class Featured(Protocol):
    """A reward with features. Each row depends on its own sample and prompt alone."""

    def features(self, samples: Samples) -> Float[Tensor, "n d"]: ...


@runtime_checkable
class GradedFeatured(Protocol):
    """Features that also have a gradient with respect to the pixels."""

    def graded_features(
        self, media: Float[Tensor, "n 3 h w"], samples: Samples
    ) -> Float[Tensor, "n d"]:
        """The same features of float tensors in 0..1, up to the rounding of 8-bit images. `samples`
        has the prompts; its media must not be read."""
        ...


@dataclass(frozen=True)
class FeatureModel:
    """Features without a score.

    model   of images, or of texts
    frames  of a video whose features are averaged
    kinds   of samples that it reads
    """

    model: Featured
    frames: Frames = "all"
    kinds: tuple[Kind, ...] = ("image", "video")


FeatureReward = Reward | FeatureModel


def inner_features(name: str, reward: FeatureReward) -> Featured:
    """The features of a loaded reward or model. Only those are asked that have features: `fitted`
    names them."""
    if isinstance(reward, FeatureModel):
        return reward.model
    inner = reward.reward if isinstance(reward, OverFrames) else reward
    assert isinstance(inner, Featured), name
    return inner


def feature_kinds(reward: FeatureReward) -> tuple[Kind, ...]:
    """The kinds of samples that features are of."""
    return reward.kinds if isinstance(reward, FeatureModel) else ("image", "video")


def features_of(name: str, reward: FeatureReward, samples: Samples) -> Float[Tensor, "n d"]:
    """Features of n > 0 samples, in float32 on the CPU. A video's are the mean of its frames'
    (those that the reward's setting `frames` chooses)."""
    inner, kinds = inner_features(name, reward), feature_kinds(reward)
    if expect(samples, name, *kinds) != "video" or not isinstance(
        reward, OverFrames | FeatureModel
    ):
        return inner.features(samples).float().cpu()
    rows: list[int] = []
    frames: list[Tensor] = []
    for row, video in enumerate(items(samples)):
        chosen = frame_indices(len(video), reward.frames)
        rows += [row] * len(chosen)
        frames += [video[frame] for frame in chosen]
    prompts = [samples.prompts[row] for row in rows]
    at = torch.tensor(rows)
    of_frames = inner.features(Samples(frames, prompts, samples.group.cpu()[at])).float().cpu()
    total = torch.zeros(len(samples.prompts), of_frames.shape[1]).index_add_(0, at, of_frames)
    return total / at.bincount(minlength=len(total))[:, None]


def graded_features_of(
    name: str, reward: FeatureReward, media: Float[Tensor, "n ..."], samples: Samples
) -> Float[Tensor, "n d"]:
    """`features_of` media [n 3 h w] or [n f 3 h w], with a gradient. ValueError for features
    without one."""
    inner = inner_features(name, reward)
    if not isinstance(inner, GradedFeatured):
        raise ValueError(f"the features of the reward {name!r} have no gradient")
    if media.ndim == 4 or not isinstance(reward, OverFrames | FeatureModel):
        return inner.graded_features(media, samples)
    frames = frame_indices(media.shape[1], reward.frames)
    rows = [row for row in range(len(media)) for _ in frames]
    of_frames = inner.graded_features(media[:, frames].flatten(0, 1), samples.take(rows))
    return of_frames.unflatten(0, (len(media), len(frames))).mean(1)
