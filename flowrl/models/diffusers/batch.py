"""Prompts of a pipeline, encoded once, and the samples made of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.media.statistics import Statistics, image_statistics
from flowrl.models.diffusers.conditioning import Conditioning
from flowrl.models.diffusers.schedule import PipelineSchedule
from flowrl.models.evaluation_counter import Meter
from samplers import Begin, Planner, Rollout, Velocity, roll


class Scales(NamedTuple):
    """Guidance scales; None for a pipeline that takes none."""

    sample: float | None = 1.0
    train: float | None = 1.0


@runtime_checkable
class Driven(Protocol):
    """The part of `PipelinePolicy` that a batch uses."""

    guidance: Scales
    device: torch.device

    @property
    def arithmetic(self) -> torch.dtype: ...

    def schedule(self, steps: int) -> PipelineSchedule: ...

    def begin(self, conditioning: Conditioning, steps: int) -> Begin | None: ...

    def latents(self, x: Tensor, steps: int) -> Tensor: ...

    def shape(self, steps: int) -> tuple[int, ...]: ...

    def bind(
        self, conditioning: Conditioning, *, steps: int, guidance: float | None
    ) -> Velocity: ...

    def decode(
        self, x0: Tensor, conditioning: Conditioning, *, steps: int, guidance: float | None
    ) -> Tensor: ...


@dataclass(frozen=True)
class Painting:
    """A `flowrl.models.policy.Batch` of images or videos. `meter` counts sampling."""

    owner: Driven
    conditioning: Conditioning
    steps: int
    meter: Meter = field(default_factory=Meter)

    @property
    def policy(self) -> Velocity:
        """The velocity at the guidance of training."""
        return self._bind(self.owner.guidance.train)

    def _bind(self, guidance: float | None) -> Velocity:
        return self.owner.bind(self.conditioning, steps=self.steps, guidance=guidance)

    def rollouts(
        self,
        plan: Planner,
        draws: Sequence[int],
        *,
        seed: int,
        iteration: int,
        keep_mean: bool = False,
        score: Callable[[Rollout], Tensor] | None = None,
        on_rollout: Callable[[Rollout], None] | None = None,
    ) -> tuple[Rollout, ...]:
        plans = plan(self.owner.schedule(self.steps).sigmas, iteration, seed)

        def guess(x0: Tensor, prompt: Tensor) -> Tensor:
            """The reward of predicted clean latents."""
            assert score is not None  # roll calls it only if a score is given
            return score(Rollout(plans[0], x0, prompt, tuple(draws), (), seed, iteration, 0))

        def decoded(rollout: Rollout) -> Rollout:
            return replace(rollout, x0=self.owner.latents(rollout.x0, self.steps))

        rollouts = roll(
            plans,
            self.meter(self._bind(self.owner.guidance.sample)),
            self.owner.shape(self.steps),
            draws,
            seed=seed,
            iteration=iteration,
            keep_mean=keep_mean,
            score=None if score is None else guess,
            on_rollout=None if on_rollout is None else lambda r: on_rollout(decoded(r)),
            begin=self.owner.begin(self.conditioning, self.steps),
            device=self.owner.device,
            dtype=self.owner.arithmetic,
        )
        return tuple(decoded(rollout) for rollout in rollouts)

    def media(self, rollout: Rollout) -> Tensor:
        """Decode samples to images, with their own encodings, which some decoders read."""
        return self.owner.decode(
            rollout.x0,
            self.conditioning.take(rollout.prompt.cpu()),
            steps=self.steps,
            guidance=self.owner.guidance.sample,
        )

    def statistics(self, rollout: Rollout, media: Tensor) -> Statistics:
        return image_statistics(media, rollout.prompt.cpu()).named("image/")
