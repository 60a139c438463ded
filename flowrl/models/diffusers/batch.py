"""Prompts, encoded once, and their samples from integrating a velocity."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.media.statistics import (
    Statistics,
    image_statistics,
    sound_statistics,
    tensor_statistics,
)
from flowrl.models.call_sizes import CallKind, CallSizes
from flowrl.models.diffusers.call.levels.schedule import PipelineSchedule
from flowrl.models.diffusers.call.results.decoder import Decoded
from flowrl.models.evaluation_counter import Meter
from rewards.types import MediaForm
from samplers import Begin, Latents, Plan, Planner, Rollout, Sampling, Velocity, roll
from samplers.held import Held
from samplers.host import on_host
from samplers.layout import Layout
from samplers.noise import NoiseKind
from samplers.slices import DrawsSlice, draw_slices, joined_rollout, placed_rollout
from samplers.storage import Storage


class Scales(NamedTuple):
    """Guidance scales; None for a pipeline without guidance."""

    sample: float | None = 1.0
    train: float | None = 1.0


@runtime_checkable
class Prompted(Protocol):
    """Encoded prompts, by row. `extras`: columns that rows of a call must share; empty: none."""

    @property
    def extras(self) -> Sequence[Any]: ...

    def __len__(self) -> int: ...

    def take(self, rows: Tensor) -> "Prompted": ...


@runtime_checkable
class Driven(Protocol):
    """A model that samples by integrating a velocity: the interface that a batch uses."""

    @property
    def name(self) -> str: ...

    @property
    def guidance(self) -> Scales: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def sizes(self) -> CallSizes: ...

    @property
    def storage(self) -> Storage: ...

    @property
    def noise(self) -> NoiseKind: ...

    @property
    def layout(self) -> Layout | None: ...

    @property
    def sound_rate(self) -> int | None: ...

    @property
    def arithmetic(self) -> torch.dtype: ...

    def schedule(self, steps: int) -> PipelineSchedule: ...

    def encode(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]] = ()
    ) -> Prompted: ...

    def shape(self, steps: int) -> tuple[int, ...]: ...

    def scale(self, guidance: Any) -> float | None: ...

    def held(self, conditioning: Any, steps: int) -> Held | None: ...

    def pictured(self, conditioning: Any, steps: int) -> bool: ...

    def fitted(self, plans: Sequence[Plan], steps: int) -> tuple[Plan, ...]: ...

    def begin(self, conditioning: Any, steps: int) -> Begin | None: ...

    def latents(self, x: Tensor, steps: int) -> Tensor: ...

    def bind(
        self,
        conditioning: Any,
        *,
        steps: int,
        guidance: float | None,
        kind: CallKind = "sampling",
    ) -> Velocity: ...

    def decode(
        self,
        x0: Tensor,
        conditioning: Any,
        *,
        steps: int,
        guidance: float | None,
        graded: bool = False,
    ) -> Tensor: ...

    def decoded(
        self,
        x0: Tensor,
        conditioning: Any,
        *,
        steps: int,
        guidance: float | None,
        graded: bool = False,
    ) -> Decoded: ...


@dataclass(frozen=True)
class RollCall:
    """Plans to roll out for some draws of a batch.

    rows      of the batch's prompts, one per draw
    velocity  of the sampling weights; its `prompt` is an index into `draws`
    """

    batch: "MediaBatch"
    plans: Sequence[Plan]
    draws: Sequence[int]
    rows: range
    velocity: Velocity
    latents: Latents
    seed: int
    iteration: int
    sampling: Sampling[Rollout]


@runtime_checkable
class Rolls(Protocol):
    """Rolls plans out: with the model of this process, or elsewhere."""

    def __call__(self, asked: RollCall) -> tuple[Rollout, ...]: ...

    def close(self) -> None: ...  # at the end of a run


class RollsHere:
    """Rolls plans out with the velocity of the batch's own model."""

    def __call__(self, asked: RollCall) -> tuple[Rollout, ...]:
        return roll(
            asked.plans, asked.velocity, asked.latents, asked.draws, seed=asked.seed,
            iteration=asked.iteration, sampling=asked.sampling,
        )  # fmt: skip

    def close(self) -> None:
        """Do nothing, since nothing is held outside this process."""


@dataclass(frozen=True)
class MediaBatch:
    """A `flowrl.models.policy.Batch` of images or videos. `meter` counts sampling evaluations;
    `ending` replaces the sampling velocity in part of the loop."""

    owner: Driven
    conditioning: Prompted
    steps: int
    meter: Meter = field(default_factory=Meter)
    ending: "Callable[[MediaBatch, Velocity], Velocity] | None" = None
    rolls: Rolls = field(default_factory=RollsHere)

    @property
    def policy(self) -> Velocity:
        """Velocity at the guidance scale of training."""
        return self._bind(self.owner.guidance.train, "training")

    def _bind(self, guidance: float | None, kind: CallKind) -> Velocity:
        return self.owner.bind(self.conditioning, steps=self.steps, guidance=guidance, kind=kind)

    def rollouts(
        self,
        plan: Planner,
        draws: Sequence[int],
        *,
        seed: int,
        iteration: int,
        sampling: Sampling[Rollout] = Sampling(),
    ) -> tuple[Rollout, ...]:
        owner, on_rollout = self.owner, sampling.on_rollout

        def decoded(rollout: Rollout) -> Rollout:
            def latents(x0: Tensor) -> Tensor:
                return owner.latents(x0, self.steps)

            notes = tuple(note.with_clean(latents) for note in rollout.notes)
            return replace(rollout, x0=latents(rollout.x0), notes=notes)

        if on_rollout is not None:
            sampling = replace(sampling, on_rollout=lambda rollout: on_rollout(decoded(rollout)))
        plans = plan(owner.schedule(self.steps).sigmas, iteration, seed)
        plans = owner.fitted(plans, self.steps)
        begin = owner.begin(self.conditioning, self.steps)
        velocity = self._bind(owner.guidance.sample, "sampling")
        if self.ending is not None:
            velocity = self.ending(self, velocity)
        metered = self.meter(velocity)
        latents = Latents(
            shape=owner.shape(self.steps),
            device=owner.device,
            dtype=owner.arithmetic,
            begin=begin,
            storage=owner.storage,
            held=owner.held(self.conditioning, self.steps),
            noise=owner.noise,
            layout=owner.layout,
        )
        rows = range(len(draws))
        call = RollCall(
            batch=self,
            plans=plans,
            draws=draws,
            rows=rows,
            velocity=metered,
            latents=latents,
            seed=seed,
            iteration=iteration,
            sampling=sampling,
        )
        slices = [] if sampling.on_slice is None else self._slices(plans, draws)
        if len(slices) < 2 or sampling.on_slice is None:
            return tuple(map(decoded, self.rolls(call)))
        rollouts: list[Rollout] = []
        for piece in slices:
            call_of_slice = replace(
                call,
                draws=piece.draws,
                rows=rows[piece.first : piece.first + len(piece.draws)],
                velocity=piece.velocity(metered),
                latents=replace(latents, begin=piece.begin(begin)),
            )
            (rolled,) = self.rolls(call_of_slice)
            rollouts.append(decoded(placed_rollout(rolled, piece)))
            sampling.on_slice(rollouts[-1])
        return (joined_rollout(rollouts, tuple(draws)),)

    def _slices(self, plans: Sequence[Plan], draws: Sequence[int]) -> list[DrawsSlice]:
        """The slices of a single plan's draws. Calls group rows with the same images."""
        sizes, alone = self.owner.sizes, len(plans) == 1 and not self.conditioning.extras
        rows, decoded = sizes.sampling, sizes.decoding
        if rows is None or decoded is None or not alone:
            return [DrawsSlice(0, tuple(draws))]
        return list(draw_slices(plans[0], draws, rows, decoded))

    def media(self, rollout: Rollout) -> Tensor | Decoded:
        """Decode samples to images, with their prompt encodings, which some decoders need; states
        with parts to videos and their sound; sound alone to waveforms at their rate."""
        if self.owner.layout is None and self.owner.sound_rate is None:
            return self.decode(rollout.x0, rollout.prompt)
        rows = self.conditioning.take(on_host(rollout.prompt))
        scale = self.owner.guidance.sample
        return self.owner.decoded(rollout.x0, rows, steps=self.steps, guidance=scale)

    def decode(self, x0: Tensor, prompt: Tensor, graded: bool = False) -> Tensor:
        """Decode latents [n *d] to images or videos alone; `prompt` [n] are indices into this
        batch. `graded` keeps the gradient with respect to x0."""
        return self.owner.decode(
            x0,
            self.conditioning.take(on_host(prompt)),
            steps=self.steps,
            guidance=self.owner.guidance.sample,
            graded=graded,
        )

    def clean(self, x: Tensor, prompt: Tensor) -> Tensor:
        """Convert states [n *d] of these prompts [n] at the schedule's last level to the input of
        `decode`, with gradients."""
        del prompt
        return self.owner.latents(x, self.steps)

    def statistics(self, rollout: Rollout, media: Any) -> Statistics:
        group = on_host(rollout.prompt)
        if self.owner.sound_rate is not None:
            return sound_statistics(media, group).named("sound/")
        if len(media) and MediaForm.of(media[0]).kind == "tensor":
            return tensor_statistics(media, group).named("sample/")
        return image_statistics(media, group).named("image/")
