"""Rewards with a gradient with respect to the pixels: the list of them, and how they are called.

A reward offers it by a method `differentiable(media, samples) -> [n]` beside `__call__`: the same
scores, up to the rounding of 8-bit images, as a differentiable function of float tensors in 0..1.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.checks.proofs import PROOFS
from rewards.perception.frames import AGGREGATES, OverFrames, ScoresImages, frame_indices
from rewards.types import Reward, Samples

GRADED = tuple(
    sorted(["brightness", "fitted", *(name for name, proof in PROOFS.items() if proof.gradient)])
)
"""Names of the rewards that offer a gradient."""


@runtime_checkable
class Differentiable(Protocol):
    """A reward whose scores have a gradient with respect to the media."""

    def differentiable(
        self, media: Float[Tensor, "n 3 h w"], samples: Samples
    ) -> Float[Tensor, " n"]:
        """Scores of media, given as floats in 0..1 on the device of the model that generated them.

        `samples` has the prompts, groups and columns of the same n samples; its media must not be
        read. Videos are [n f 3 h w]. Each score depends on its own sample alone.
        """
        ...


DifferentiableScore = Callable[[Tensor, Samples], Float[Tensor, " n"]]


def differentiable_score(name: str, reward: Reward | ScoresImages) -> DifferentiableScore:
    """Return the reward as a differentiable function (media, samples).

    Raise a ValueError if the reward has no gradient."""
    if isinstance(reward, OverFrames):
        inner = differentiable_score(name, reward.reward)
        return lambda media, samples: _over_frames(reward, inner, media, samples)
    if isinstance(reward, Differentiable):
        return reward.differentiable
    raise ValueError(no_gradient(name))


def no_gradient(name: str) -> str:
    return (
        f"reward {name}: it offers no gradient, which this recipe needs: use one of "
        f"{', '.join(GRADED)}, your own class with `differentiable` (docs/own_rewards.md), or "
        "a recipe that compares scores, such as nft or flow_grpo"
    )


def never_graded(name: str) -> bool:
    """Whether the named reward is known, before it loads, to have no gradient.

    A reward of a user's file or of Python is asked once it is loaded.
    """
    return name not in GRADED and ":" not in name and not name.endswith(".py")


def _over_frames(
    over: OverFrames, inner: DifferentiableScore, media: Tensor, samples: Samples
) -> Float[Tensor, " n"]:
    """Score images directly; for videos, aggregate the scores of the chosen frames."""
    if media.ndim == 4:
        return inner(media, samples)
    frames = frame_indices(media.shape[1], over.frames)
    rows = [row for row in range(len(media)) for _ in frames]
    scores = inner(media[:, frames].flatten(0, 1), samples.take(rows))
    return torch.stack(
        [AGGREGATES[over.aggregate](of_sample) for of_sample in scores.split(len(frames))]
    )
