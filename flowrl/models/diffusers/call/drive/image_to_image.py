"""The start of a loop: pure noise, or a noised image (image to image).

A `strength` below 1 cuts the list of steps and starts from the given image, noised to the first
level. Our plans draw that noise themselves, so this file finds the image's part, which is the first
state of a call with zero noise. The rest must be noise of the level's size.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.call.drive.patches import Patch
from flowrl.models.diffusers.modular.face import modules_of

NEAR_STATE = 5e-3  # of the noise's size from the level's: some schedulers round their timesteps


class RecordedNoise:
    """A replacement for `randn_tensor` that returns the same numbers times `size` and records
    them."""

    def __init__(self, size: float):
        self.size = size
        self.drawn: list[Tensor] = []

    def patches(self, pipe: Any) -> list[Patch]:
        """Patches for every diffusers module that defines a method of the pipeline, or a block."""
        modules = [sys.modules[name] for name in modules_of(pipe)]
        return [
            Patch(module, "randn_tensor", self._of(vars(module)["randn_tensor"]))
            for module in modules
            if "randn_tensor" in vars(module)
        ]

    def _of(self, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def draw(*args: Any, **named: Any) -> Tensor:
            self.drawn.append(real(*args, **named))
            return self.drawn[-1] * self.size

        return draw


class GivenNoise(RecordedNoise):
    """The same, but every draw is `noise`, the noise of one scheduler step."""

    def __init__(self, noise: Tensor):
        super().__init__(1.0)
        self.noise = noise

    def patches(self, pipe: Any) -> list[Patch]:
        flow_match = Patch(
            torch, "randn_like", lambda like: self.noise.reshape(like.shape).to(like)
        )
        return [*super().patches(pipe), flow_match]

    def _of(self, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def draw(*args: Any, **named: Any) -> Tensor:
            drawn = real(*args, **named)
            return self.noise.reshape(drawn.shape).to(drawn)

        return draw


class CleanPart(NamedTuple):
    """The flow state without its noise [1 *d]. `scale` converts the loop's state to a flow
    state."""

    state: Tensor
    scale: float


def clean_part(
    first: Callable[[RecordedNoise], Tensor], sigma: float, owner: str
) -> CleanPart | None:
    """Clean part of the flow state at `sigma`; None if the loop starts from noise alone.

    `first` returns the loop's first state [1 *d] under some draws. Raises UserError unless this is
    the sum of an image and of noise of the level's size.
    """
    nothing = first(RecordedNoise(0.0))
    if not bool(nothing.any()):
        return None
    once, twice = RecordedNoise(1.0), RecordedNoise(2.0)
    noise = first(once) - nothing
    drawn = [values for values in once.drawn if values.numel() == noise.numel()]
    away = (first(twice) - nothing - 2 * noise).abs().max()
    if not drawn or float(away) > NEAR_STATE * float(noise.abs().max()):
        raise UserError(
            f"{owner} starts from an image, but without the noise that our samplers add"
        )
    size = float(noise.float().std() / drawn[-1].float().std())
    # of a flow, of alpha x0 + s noise, of x0 + (s / alpha) noise
    possible_sizes = [sigma, sigma / math.hypot(sigma, 1 - sigma)]
    possible_sizes += [sigma / (1 - sigma)] if sigma < 1 else []
    if not any(math.isclose(size, one, rel_tol=NEAR_STATE) for one in possible_sizes):
        raise UserError(
            f"{owner} starts from an image with noise of size {size:.4g} at the level "
            f"{sigma:.4g}: our samplers would start from another state"
        )
    return CleanPart(nothing * (sigma / size), sigma / size)


def noise_sizes(first: Tensor, seen: Tensor, drawn: Sequence[Tensor]) -> tuple[float, float]:
    """Size of the pipeline's noise, and of the denoiser's first input relative to it.

    `first` is the loop's first state with a stand-in that does not scale, `seen` the denoiser's
    input in the pipeline's own call, both for the draws `drawn`. This is measured, since schedulers
    scale their noise by 1, by their highest sigma, or by sqrt(sigma^2 + 1).
    """
    same = [values for values in drawn if values.numel() == first.numel()]
    sizes = [size for values in same if (size := _ratio(values, first)) is not None]
    pipeline_size = sizes[-1] if sizes else 1.0
    pipeline_size = 1.0 if math.isclose(pipeline_size, 1.0, rel_tol=NEAR_STATE) else pipeline_size
    if torch.equal(first, seen):
        return pipeline_size, 1.0
    a, b = first.cpu().double().flatten(), seen.cpu().double().flatten()
    return pipeline_size, float(a @ b / (a @ a))


def _ratio(drawn: Tensor, first: Tensor) -> float | None:
    """Return the factor between the drawn numbers and the first state's numbers, in any order, or
    None."""
    a, b = (
        drawn.cpu().double().flatten().sort().values,
        first.cpu().double().flatten().sort().values,
    )
    ratio = float(a @ b / (a @ a))
    away = (b - ratio * a).abs().max()
    return ratio if float(away) <= NEAR_STATE * float(b.abs().max()) else None
