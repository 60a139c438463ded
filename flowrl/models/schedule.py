"""Which noise levels a pipeline's own call visits, and what its loop passes for them."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """The scheduler's own lists for a resolution and number of steps, dynamic shifting included.

    `sigmas`: steps + 1 falling noise levels, the last 0. `timesteps` [steps]: what the loop passes
    for them, in its own dtype. `train`: timesteps a unit of sigma.
    """

    sigmas: tuple[float, ...]
    timesteps: Tensor
    train: int

    @classmethod
    def of(cls, scheduler: Any, steps: int, owner: str) -> "Schedule":
        """After a call has set the scheduler's steps. Raises UserError for what is no flow."""
        sigmas = tuple(scheduler.sigmas.detach().cpu().float().tolist())
        timesteps = scheduler.timesteps.detach().cpu()
        falling = all(a > b for a, b in pairwise(sigmas))
        if len(sigmas) != steps + 1 or len(timesteps) != steps or not falling or sigmas[-1] != 0.0:
            raise UserError(
                f"{owner}: {type(scheduler).__name__} gives {len(timesteps)} timesteps and the "
                f"sigmas {sigmas} for {steps} steps, not {steps + 1} that fall to 0: "
                "use FlowMatchEulerDiscreteScheduler"
            )
        if sigmas[0] > 1.0:
            raise UserError(f"{owner}: its first sigma is {sigmas[0]}, a flow's is at most 1")
        return cls(sigmas, timesteps, scheduler.config.num_train_timesteps)

    def index(self, sigma: Tensor) -> Tensor:
        """[n] place of each sigma in the list, -1 where it is not in it."""
        known = torch.tensor(self.sigmas[:-1], dtype=torch.float32)
        same = sigma.detach().cpu().to(torch.float32)[:, None] == known
        return torch.where(same.any(1), same.int().argmax(1), -1)

    def times(self, sigma: Tensor) -> Tensor:
        """[n] timesteps: the scheduler's own value where sigma is in the list, else sigma train."""
        index = self.index(sigma)
        free = (sigma.detach().cpu().to(torch.float32) * self.train).to(self.timesteps.dtype)
        return torch.where(index >= 0, self.timesteps[index.clamp(min=0)], free)


@dataclass(frozen=True)
class Start:
    """The loop's first state: its schedule, and of its latents a row's shape, dtype, device.

    The pipeline is put on its device before any of this is asked for.
    """

    schedule: Schedule
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Way:
    """How a velocity is reached. `forward`: fast-forward to the step's index, else pinned."""

    steps: int
    guidance: float | None
    forward: bool
    mixed: bool  # rows of several sigmas may share a call
