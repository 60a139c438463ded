"""Where a loop begins: at noise alone, or at a picture with noise on it (image to image).

A `strength` below 1 cuts the list of steps and starts from the given picture, noised to the first
level. Our plans draw that noise themselves, so the picture's part is found here: the first state
of a call whose noise is 0. What is left must be noise of the level's size, or it is refused.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flowrl.errors import UserError
from flowrl.models.diffusers.scheduler_standin import Patch

NEAR_STATE = 5e-3  # of the noise's size from the level's: some schedulers round their timesteps


class RecordedNoise:
    """Stands for `randn_tensor`: the same numbers, `size` times as large, and kept."""

    def __init__(self, size: float):
        self.size = size
        self.drawn: list[Tensor] = []

    def patches(self, pipe: Any) -> list[Patch]:
        """In every module of diffusers that a method of the pipeline comes from."""
        modules = {kind.__module__: sys.modules[kind.__module__] for kind in type(pipe).__mro__}
        return [
            Patch(module, "randn_tensor", self._of(vars(module)["randn_tensor"]))
            for module in modules.values()
            if "randn_tensor" in vars(module)
        ]

    def _of(self, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def draw(*args: Any, **named: Any) -> Tensor:
            self.drawn.append(real(*args, **named))
            return self.drawn[-1] * self.size

        return draw


def clean_part(first: Callable[[RecordedNoise], Tensor], sigma: float, owner: str) -> Tensor | None:
    """The flow state at `sigma` without its noise; None where a loop begins at noise alone.

    `first` gives the loop's first state [1 *d] under some draws. Raises UserError where that state
    is no sum of a picture and of noise as large as the level says.
    """
    nothing = first(RecordedNoise(0.0))
    if not bool(nothing.any()):
        return None
    once, twice = RecordedNoise(1.0), RecordedNoise(2.0)
    noise = first(once) - nothing
    drawn = [values for values in once.drawn if values.numel() == noise.numel()]
    away = (first(twice) - nothing - 2 * noise).abs().max()
    if not drawn or float(away) > NEAR_STATE * float(noise.abs().max()):
        raise UserError(f"{owner} begins at a picture without the noise that our samplers draw")
    size = float(noise.float().std() / drawn[-1].float().std())
    # of a flow, of alpha x0 + s noise, of x0 + (s / alpha) noise
    known = [sigma, sigma / math.hypot(sigma, 1 - sigma)]
    known += [sigma / (1 - sigma)] if sigma < 1 else []
    if not any(math.isclose(size, one, rel_tol=NEAR_STATE) for one in known):
        raise UserError(
            f"{owner} begins with noise of size {size:.4g} on a picture, at the level {sigma:.4g}: "
            "our samplers would begin elsewhere"
        )
    return nothing * (sigma / size)
