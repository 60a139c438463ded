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

    parts   a batch for each size, all with one meter
    indices  of each part, the indices of its prompts among all prompts
    """

    parts: tuple[MediaBatch, ...]
    indices: tuple[tuple[int, ...], ...]
    meter: Meter

    @cached_property
    def _local(self) -> Tensor:
        """The part of each prompt, and its index in that part [prompts 2]."""
        pairs = {
            at: (k, i)
            for k, part_indices in enumerate(self.indices)
            for i, at in enumerate(part_indices)
        }
        return torch.tensor([pairs[at] for at in range(len(pairs))])

    @property
    def owner(self) -> Driven:
        """The policy at the first size."""
        return self.parts[0].owner

    @property
    def policy(self) -> Velocity:
        """Velocity at the guidance scale of training. The rows of a call have one size."""
        policies = [part.policy for part in self.parts]

        def velocity(x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
            part, local = self._part(prompt)
            return policies[part](x, sigma, local)

        return velocity

    def _part(self, prompt: Tensor) -> tuple[int, Tensor]:
        """The part that prompts belong to, and their indices in it."""
        at = self._local[on_host(prompt)]
        part = int(at[0, 0]) if len(at) else 0
        assert bool((at[:, 0] == part).all()), "the rows of a call have one size"
        return part, sent(at[:, 1].contiguous(), prompt.device)

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
        `sampling` for single rollouts and parts are not called."""
        plain_sampling = replace(sampling, score=None, slope=None, on_rollout=None, on_part=None)
        keyed = {"seed": seed, "iteration": iteration, "sampling": plain_sampling}
        by_part = [
            part.rollouts(plan, [draws[i] for i in at], **keyed)
            for part, at in zip(self.parts, self.indices, strict=True)
        ]
        same = zip(*by_part, strict=True)
        return tuple(MixedRollout(parts, self.indices, tuple(draws)) for parts in same)

    def media(self, rollout: MixedRollout) -> list[Tensor] | list[Audio]:
        """Decode samples to images [3 h w], videos [f 3 h w] or sounds, each at its size."""
        by_sample: dict[int, Any] = {}
        for part, (batch, part_rollout) in enumerate(zip(self.parts, rollout.parts, strict=True)):
            decoded = batch.media(part_rollout)
            items: Any = decoded
            if isinstance(decoded, Decoded):
                assert decoded.audio is not None and decoded.sound_alone, "videos have one size"
                items = decoded.audio.each
            by_sample |= zip(rollout.samples(part).tolist(), items, strict=True)
        return [by_sample[i] for i in range(len(by_sample))]

    def decode(self, x0: Tensor, prompt: Tensor, graded: bool = False) -> Tensor:
        """Decode latents [n *d] of one size; see `MediaBatch.decode`."""
        part, local = self._part(prompt)
        return self.parts[part].decode(x0, local, graded)

    def clean(self, x: Tensor, prompt: Tensor) -> Tensor:
        """Convert states of one size; see `MediaBatch.clean`."""
        part, local = self._part(prompt)
        return self.parts[part].clean(x, local)

    def statistics(self, rollout: MixedRollout, media: Sequence[Tensor | Audio]) -> Statistics:
        parts: list[Statistics] = []
        for part, (batch, part_rollout) in enumerate(zip(self.parts, rollout.parts, strict=True)):
            chosen = [media[i] for i in rollout.samples(part).tolist()]
            rows = [item.waveform[0] if isinstance(item, Audio) else item for item in chosen]
            part_media = torch.stack(rows)
            parts.append(batch.statistics(part_rollout, part_media))
        columns = {
            name: by_draws([statistics.columns[name] for statistics in parts], self.indices)
            for name in parts[0].columns
        }
        return Statistics(
            merged_means([(statistics.means, statistics.size) for statistics in parts]), columns
        )


def refuse_mixed(batch: Any, place: str) -> None:
    """UserError for prompts of several sizes where all must have one; `place` names it."""
    if isinstance(batch, MixedBatch):
        raise UserError(
            f"{place} needs prompts of one size, but their rows have several: choose rows with "
            "`where`, or leave the columns of sizes out with `keep`"
        )
