"""Image rewards on videos: the choice of frames and the aggregation of their scores."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.perception.media import expect, items
from rewards.types import Reward, Samples

_EVERY = re.compile(r"every ([1-9]\d*)")


def _mean(scores: Float[Tensor, " f"]) -> Tensor:
    return scores.mean()


def _min(scores: Float[Tensor, " f"]) -> Tensor:
    return scores.min()


def _max(scores: Float[Tensor, " f"]) -> Tensor:
    return scores.max()


def _last(scores: Float[Tensor, " f"]) -> Tensor:
    return scores[-1]


AGGREGATES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": _mean,
    "min": _min,
    "max": _max,
    "last": _last,
}


def frame_indices(count: int, frames: str | int) -> list[int]:
    """Indices among `count` frames: all, first, every k, or a number of frames, evenly spread.

    A number takes the middles of as many equal parts, or all frames if there are fewer.
    """
    if isinstance(frames, int):
        taken = min(frames, count)
        return [int((part + 0.5) * count / taken) for part in range(taken)]
    if frames == "all":
        return list(range(count))
    if frames == "first":
        return [0]
    match = _EVERY.fullmatch(frames)
    assert match is not None  # check_frames has passed
    return list(range(0, count, int(match[1])))


@dataclass(frozen=True)
class OverFrames:
    """`reward` itself on images; on videos the aggregate of its scores of the chosen frames.

    Unscored frames (NaN) do not count; a video without any scored frame is unscored.
    """

    reward: Reward
    name: str
    frames: str | int = "all"
    aggregate: str = "mean"

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        if expect(samples, self.name, "image", "video") == "image":
            return self.reward(samples)
        rows: list[int] = []
        media: list[Tensor] = []
        for row, video in enumerate(items(samples)):
            picked = frame_indices(len(video), self.frames)
            rows += [row] * len(picked)
            media += [video[frame] for frame in picked]
        at = torch.tensor(rows, dtype=torch.long)
        meta = [samples.meta[row] for row in rows] if samples.meta else ()
        prompts = [samples.prompts[row] for row in rows]
        scores = self.reward(Samples(media, prompts, samples.group.cpu()[at], meta)).cpu()
        join = AGGREGATES[self.aggregate]
        found = torch.full((len(samples.prompts),), torch.nan, dtype=scores.dtype)
        for row in range(len(samples.prompts)):
            own = scores[at == row]
            if (own := own[~own.isnan()]).numel():
                found[row] = join(own)
        return found


def check_frames(name: str, frames: str | int, aggregate: str) -> None:
    """ValueError, naming the reward, for invalid settings; called before weights are loaded."""
    right = frames in ("all", "first") or (
        frames >= 1 if isinstance(frames, int) else bool(_EVERY.fullmatch(frames))
    )
    if not right:
        raise ValueError(f"{name}: frames is all, first, 'every 4' or a number, not {frames!r}")
    if aggregate not in AGGREGATES:
        raise ValueError(f"{name}: aggregate is {', '.join(AGGREGATES)}, not {aggregate!r}")


def over_frames(reward: Reward, name: str, frames: str | int, aggregate: str) -> Reward:
    """Turn a reward of images into one of images and videos."""
    check_frames(name, frames, aggregate)
    return OverFrames(reward, name, frames, aggregate)
