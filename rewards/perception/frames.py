"""Image rewards on videos: the choice of frames and the aggregation of their scores."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import AfterValidator
from torch import Tensor

from rewards.perception.media import expect, items
from rewards.types import Samples

_EVERY = re.compile(r"every ([1-9]\d*)")

AGGREGATES: dict[str, Callable[[Float[Tensor, " f"]], Tensor]] = {
    "mean": lambda scores: scores.mean(),
    "min": lambda scores: scores.min(),
    "max": lambda scores: scores.max(),
    "last": lambda scores: scores[-1],
}


def _checked_frames(frames: str | int) -> str | int:
    by_step = isinstance(frames, str) and _EVERY.fullmatch(frames) is not None
    if not by_step and not (frames >= 1 if isinstance(frames, int) else frames in ("all", "first")):
        raise ValueError("all, first, 'every 4' or a number")
    return frames


Frames = Annotated[str | int, AfterValidator(_checked_frames)]
Aggregate = Literal["mean", "min", "max", "last"]


def frame_indices(count: int, frames: Frames) -> list[int]:
    """Indices of the chosen frames among `count`: all, first, every k, or a number of evenly spread
    frames.

    A number takes the middle frames of that many equal parts, or all frames if there are fewer.
    """
    if isinstance(frames, int):
        taken = min(frames, count)
        return [int((part + 0.5) * count / taken) for part in range(taken)]
    if frames == "all":
        return list(range(count))
    if frames == "first":
        return [0]
    match = _EVERY.fullmatch(frames)
    assert match is not None  # the loader has checked the setting
    return list(range(0, count, int(match[1])))


ScoresImages = Callable[[Samples], Float[Tensor, " n"]]


@dataclass(frozen=True)
class OverFrames:
    """Applies `reward` to images; a video gets the aggregate of its chosen frames' scores.

    Unscored frames (NaN) do not count; a video without any scored frame is unscored.
    """

    reward: ScoresImages
    name: str
    frames: Frames = "all"
    aggregate: Aggregate = "mean"

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        if not samples.prompts:
            return torch.zeros(0)
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
        joined = torch.full((len(samples.prompts),), torch.nan, dtype=scores.dtype)
        for row in range(len(samples.prompts)):
            of_sample = scores[at == row]
            if (of_sample := of_sample[~of_sample.isnan()]).numel():
                joined[row] = join(of_sample)
        return joined
