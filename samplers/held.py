"""States with given entries: inpainting with weights that were not trained for masks."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from samplers.kernels import per_row


@dataclass(frozen=True)
class Held:
    """Entries that follow a given image after every step: (1 - s) clean + s noise, s the level.

    The noise is that of the first state, `begun` + `size` noise. Held entries are not sampled, so
    densities, divergences and matching errors leave them out. p rows of the conditioning.

    begun  the image's part of the first states; None if they are noise alone
    end    factor of `clean` in the last states (for schedulers that end above 0)
    """

    free: Bool[Tensor, "p *d"]
    clean: Float[Tensor, "p *d"]
    begun: Float[Tensor, "p *d"] | None = None
    size: float = 1.0
    end: float = 1.0

    def put(
        self,
        x: Float[Tensor, "n *d"],
        root: Float[Tensor, "n *d"],
        prompt: Int[Tensor, " n"],
        sigma: float | None,
    ) -> Float[Tensor, "n *d"]:
        """Set the held entries of states to a level; None for the last states. `root` are the first
        states of the same samples."""
        clean = self.clean[prompt].to(x)
        if sigma is None:
            return torch.where(self.free[prompt], x, self.end * clean)
        begun = 0.0 if self.begun is None else self.begun[prompt].to(x)
        noise = (root.to(x) - begun) / self.size
        return torch.where(self.free[prompt], x, (1 - sigma) * clean + sigma * noise)

    def velocity(
        self,
        v: Float[Tensor, "n *d"],
        x: Float[Tensor, "n *d"],
        sigma: Float[Tensor, " n"],
        prompt: Int[Tensor, " n"],
    ) -> Float[Tensor, "n *d"]:
        """Velocities whose held entries lead to the image, whatever the policy."""
        away = (x - self.clean[prompt].to(x)) / per_row(sigma.to(x), x)
        return torch.where(self.free[prompt], v, away.to(v))
