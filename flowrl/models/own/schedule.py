"""Noise levels of a user's own model, and its predictions as velocities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.levels.schedule import PipelineSchedule
from flowrl.models.own.protocol import PARAMETRIZATIONS, Diffused, Parametrization, Parametrized
from samplers.adapt import flow_velocity, from_vp, level, to_vp
from samplers.host import on_host

Levels = Callable[[int], Sequence[float]]  # of a number of steps, without the final 0


@dataclass(frozen=True)
class Scheduled:
    """The parametrization of a model, read only once.

    levels  sigma by time, increasing, of a variance-preserving process; None for a flow
    user    levels of `model.sigmas`; None: evenly spaced levels, in sigma or in time
    """

    name: str
    prediction: Parametrization
    levels: Float[Tensor, " T"] | None
    user: Levels | None

    @classmethod
    def of(cls, name: str, model: Any, user: Levels | None) -> "Scheduled":
        """Read a model. UserError for a prediction or levels that do not determine a velocity."""
        prediction = model.prediction if isinstance(model, Parametrized) else "velocity"
        if prediction not in PARAMETRIZATIONS:
            raise UserError(
                f"{name}: prediction must be one of {', '.join(PARAMETRIZATIONS)}, not "
                f"{prediction!r}"
            )
        if not isinstance(model, Diffused):
            if prediction == "v_prediction":
                raise UserError(
                    f"{name}: v_prediction is alpha noise - s x0 of a variance-preserving process: "
                    "add alphas_cumprod, or predict the velocity noise - x0"
                )
            return cls(name, prediction, None, user)
        if prediction == "velocity":
            raise UserError(
                f"{name}: alphas_cumprod belongs to the predictions epsilon, v_prediction and "
                "sample: add `prediction`, or leave alphas_cumprod out"
            )
        if user is not None:
            raise UserError(
                f"model.sigmas: the levels of {name} come from its alphas_cumprod: leave it out"
            )
        alphas = torch.as_tensor(model.alphas_cumprod).detach().cpu().double()
        falls = alphas.ndim == 1 and len(alphas) > 1 and bool((alphas.diff() < 0).all())
        if not falls or not 0 <= float(alphas[-1]) < float(alphas[0]) <= 1:
            raise UserError(f"{name}: alphas_cumprod must be a list that decreases, within [0, 1]")
        return cls(name, prediction, level(alphas), None)

    def schedule(self, steps: int) -> PipelineSchedule:
        """The levels for this number of steps: 1 - i / steps, the levels of `model.sigmas`, or the
        levels of the times T - 1 - i T / steps ("trailing", arXiv:2305.08891), each with a final
        0."""
        count, times = self.levels, torch.zeros(0)
        if count is None:
            even = [1 - i / steps for i in range(steps)]
            sigmas = (*(even if self.user is None else self.user(steps)), 0.0)
        else:
            if steps > len(count):
                raise UserError(
                    f"{self.name}: {steps} steps, but its alphas_cumprod has {len(count)} times"
                )
            indices = [round(len(count) * (1 - i / steps)) - 1 for i in range(steps)]
            sigmas = (*count[indices].tolist(), 0.0)
            times = torch.tensor(indices, dtype=torch.float64)
        if self.prediction == "epsilon" and sigmas[0] >= 1:
            raise UserError(
                f"{self.name}: it predicts the noise, but starts at pure noise, where this does "
                "not determine the sample: predict sample or velocity, or start lower "
                "(model.sigmas for a flow, alphas_cumprod above 0 for a diffusion)"
            )
        return PipelineSchedule(sigmas, times, 1, levels=count)

    def begin(self, noise: Tensor, sigma: float) -> Tensor:
        """First states from noise: N(0, 1) in the model's own scale."""
        if self.levels is None:
            return noise
        return from_vp(noise, noise.new_full((len(noise),), sigma))

    def asked(self, x: Tensor, sigma: Tensor, schedule: PipelineSchedule) -> tuple[Tensor, Tensor]:
        """The arguments of `forward` for flow states [n *d] at levels [n]."""
        if self.levels is None:
            return x, sigma
        return to_vp(x, sigma), schedule.times(on_host(sigma)).to(sigma)

    def velocity(self, x: Tensor, sigma: Tensor, predicted: Tensor) -> Tensor:
        """The velocity noise - x0 [n *d] from a prediction at flow states x [n *d]."""
        if self.prediction == "velocity":
            return predicted
        return flow_velocity(self.prediction, to_vp(x, sigma), predicted, sigma)
