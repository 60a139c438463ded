"""Hybrid inference: the base model takes the last steps of a sample (MixGRPO, arXiv:2507.21802)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.loaders.peft import PeftAdapterMixin
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.batch import MediaBatch
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.sizes.by_size import LoopSize, OpenedBatch
from flowrl.models.diffusers.sizes.mixed_batch import MixedBatch
from samplers import Ode, Velocity


@dataclass(frozen=True)
class HybridPolicy:
    """A policy that uses the base weights in the last `last` steps of evaluations.

    base  a policy with the base weights; None for adapters, which are switched off in those steps
    """

    policy: PipelinePolicy
    base: PipelinePolicy | None
    last: int

    def open(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]], steps: int
    ) -> OpenedBatch:
        """Open a batch, as `PipelinePolicy.open` does. UserError if no step remains for the trained
        weights."""
        if not 0 < self.last < steps:
            raise UserError(
                f"--base-steps {self.last}: at least one of the {steps} steps of a sample must "
                "use the trained weights; use --weights base to sample with the base alone"
            )
        batch = self.policy.open(prompts, meta, steps)
        if isinstance(batch, MediaBatch):
            return replace(batch, ending=self._ended)
        assert isinstance(batch, MixedBatch)
        return replace(batch, by_size=tuple(replace(b, ending=self._ended) for b in batch.by_size))

    def plain(self, group: int) -> Ode:
        return self.policy.plain(group)

    def _ended(self, painting: MediaBatch, velocity: Velocity) -> Velocity:
        """The velocity, with the base weights from the level at which the last steps begin."""
        steps, guidance, owner = painting.steps, self.policy.guidance.sample, painting.owner
        begins = owner.schedule(steps).sigmas[-1 - self.last]
        assert isinstance(owner, PipelinePolicy)
        other = owner if self.base is None else self.base.at(LoopSize.of(owner.loop))
        with self._base_weights():  # which proves a second model too
            prompts: Any = painting.conditioning
            plain = other.bind(prompts, steps=steps, guidance=guidance)

        def hybrid(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
            late = sigma <= begins * (1 + 1e-6)  # levels are float32 and those of the plan float64
            if not late.any():
                return velocity(x, sigma, prompt)
            with self._base_weights():
                v = plain(x, sigma, prompt)
            if late.all():
                return v
            shape = (-1, *(1,) * (x.ndim - 1))
            return torch.where(late.view(shape).to(v.device), v, velocity(x, sigma, prompt))

        return hybrid

    @contextmanager
    def _base_weights(self) -> Iterator[None]:
        """Switch the adapters off."""
        adapted = [] if self.base is not None else self.policy.denoisers
        for denoiser in adapted:
            assert isinstance(denoiser, PeftAdapterMixin)
            denoiser.disable_adapters()
        try:
            yield
        finally:
            for denoiser in adapted:
                assert isinstance(denoiser, PeftAdapterMixin)
                denoiser.enable_adapters()
