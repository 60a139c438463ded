"""A batch of prompts of several sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.media.statistics import Statistics, merged_means
from flowrl.models.diffusers.batch import Driven, MediaBatch
from flowrl.models.diffusers.call.results.decoder import Decoded
from flowrl.models.evaluation_counter import Meter
from rewards.audio import Audio
from samplers import Planner, Rollout, Sampling, Velocity
from samplers.host import on_host, sent
from samplers.mixed import MixedRollout, by_draws


@dataclass(frozen=True)
class MixedBatch:
    """A `flowrl.models.policy.Batch` of images or videos of several sizes.

    by_size  a batch for each size, all with one meter
    indices  of each size, the indices of its prompts among all prompts
    """

    by_size: tuple[MediaBatch, ...]
    indices: tuple[tuple[int, ...], ...]
    meter: Meter

    @cached_property
    def _local(self) -> Tensor:
        """The size of each prompt, and its index among those of the size [prompts 2]."""
        pairs = {
            at: (k, i) for k, of_size in enumerate(self.indices) for i, at in enumerate(of_size)
        }
        return torch.tensor([pairs[at] for at in range(len(pairs))])

    @property
    def owner(self) -> Driven:
        """The policy at the first size."""
        return self.by_size[0].owner

    @property
    def policy(self) -> Velocity:
        """Velocity at the guidance scale of training. The rows of a call have one size."""
        policies = [batch.policy for batch in self.by_size]

        def velocity(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
            size, local = self._size(prompt)
            return policies[size](x, sigma, local)

        return velocity

    def _size(self, prompt: Tensor) -> tuple[int, Tensor]:
        """The size that prompts belong to, by its index, and their indices among its own."""
        at = self._local[on_host(prompt)]
        size = int(at[0, 0]) if len(at) else 0
        assert bool((at[:, 0] == size).all()), "the rows of a call have one size"
        return size, sent(at[:, 1].contiguous(), prompt.device)

    def rollouts(
        self,
        plan: Planner,
        draws: Sequence[int],
        *,
        seed: int,
        iteration: int,
        sampling: Sampling[Rollout] = Sampling(),
    ) -> tuple[MixedRollout, ...]:
        """Sample each size by itself. No rollout is complete before the last size, so the hooks of
        `sampling` for single rollouts and slices are not called."""
        plain_sampling = replace(sampling, score=None, slope=None, on_rollout=None, on_slice=None)
        keyed = {"seed": seed, "iteration": iteration, "sampling": plain_sampling}
        by_size = [
            batch.rollouts(plan, [draws[i] for i in at], **keyed)
            for batch, at in zip(self.by_size, self.indices, strict=True)
        ]
        same = zip(*by_size, strict=True)
        return tuple(MixedRollout(rollouts, self.indices, tuple(draws)) for rollouts in same)

    def media(self, rollout: MixedRollout) -> list[Tensor] | list[Audio]:
        """Decode samples to images [3 h w], videos [f 3 h w] or sounds, each at its size."""
        by_sample: dict[int, Any] = {}
        for size, (batch, of_size) in enumerate(zip(self.by_size, rollout.by_size, strict=True)):
            decoded = batch.media(of_size)
            items: Any = decoded
            if isinstance(decoded, Decoded):
                assert decoded.audio is not None and decoded.sound_alone, "videos have one size"
                items = decoded.audio.each
            by_sample |= zip(rollout.samples(size).tolist(), items, strict=True)
        return [by_sample[i] for i in range(len(by_sample))]

    def decode(self, x0: Tensor, prompt: Tensor, graded: bool = False) -> Tensor:
        """Decode latents [n *d] of one size; see `MediaBatch.decode`."""
        size, local = self._size(prompt)
        return self.by_size[size].decode(x0, local, graded)

    def clean(self, x: Tensor, prompt: Tensor) -> Tensor:
        """Convert states of one size; see `MediaBatch.clean`."""
        size, local = self._size(prompt)
        return self.by_size[size].clean(x, local)

    def statistics(self, rollout: MixedRollout, media: Sequence[Tensor | Audio]) -> Statistics:
        by_size: list[Statistics] = []
        for size, (batch, of_size) in enumerate(zip(self.by_size, rollout.by_size, strict=True)):
            chosen = [media[i] for i in rollout.samples(size).tolist()]
            rows = [item.waveform[0] if isinstance(item, Audio) else item for item in chosen]
            by_size.append(batch.statistics(of_size, torch.stack(rows)))
        columns = {
            name: by_draws([statistics.columns[name] for statistics in by_size], self.indices)
            for name in by_size[0].columns
        }
        return Statistics(
            merged_means([(statistics.means, statistics.size) for statistics in by_size]), columns
        )


def refuse_mixed(batch: Any, place: str) -> None:
    """UserError for prompts of several sizes where all must have one; `place` names it."""
    if isinstance(batch, MixedBatch):
        raise UserError(
            f"{place} needs prompts of one size, but their rows have several: choose rows with "
            "`where`, or leave the columns that set sizes out with `keep`"
        )
