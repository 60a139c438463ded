"""A flow of points in the plane: a mixture of two Gaussians, and rewards with known optima.

`flowrl train examples/own/points.yaml`. The pretrained velocity is exact: the one that a mixture of
Gaussians has (`exact_velocity`), plus a small network that begins at 0 and is trained.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from flowrl.parts import Algorithm, Average, Decay
from flowrl.recipes import RECIPES
from rewards.types import Samples

CENTRES = ((-1.0, 0.0), (1.0, 0.0))  # of the two Gaussians, which are equally likely
SPREAD = 0.35  # their standard deviation
TARGET = (0.0, 0.8)  # where the reward is highest


def exact_velocity(x: Tensor, sigma: Tensor) -> Tensor:
    """E[noise - x0 | x] of the mixture, at x = (1 - sigma) x0 + sigma noise."""
    s = sigma.to(x)[:, None, None]
    centres = (1 - s) * torch.tensor(CENTRES).to(x)  # [n 2 d]
    variance = ((1 - s) * SPREAD) ** 2 + s**2
    away = x[:, None] - centres
    share = (-away.square().sum(-1, keepdim=True) / (2 * variance)).softmax(1)
    slope = (s - (1 - s) * SPREAD**2) / variance  # of E[noise - x0] in x, of one Gaussian
    return (share * (slope * away - torch.tensor(CENTRES).to(x))).sum(1)


class Points(nn.Module):
    """The velocity of the mixture plus a trained network of x, sigma and the prompt's side."""

    state = (2,)

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(6, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )
        nn.init.zeros_(self.network[-1].weight)
        nn.init.zeros_(self.network[-1].bias)

    def encode(self, prompts, rows) -> Tensor:
        """1 for a prompt that asks for the right side, -1 for the left, 0 for others: [n 1]."""
        sides = [("right" in text) - ("left" in text) for text in prompts]
        return torch.tensor(sides, dtype=torch.float32)[:, None]

    def forward(self, x: Tensor, sigma: Tensor, encoded: Tensor) -> Tensor:
        angle = math.pi * sigma.to(x)[:, None]
        seen = torch.cat([x, angle.sin(), angle.cos(), encoded.to(x), encoded.to(x) * angle], 1)
        return exact_velocity(x, sigma) + self.network(seen)


class Closeness:
    """Minus half the squared distance to the target, with a gradient.

    Under p(x) exp(r(x) / beta) each Gaussian of the mixture stays a Gaussian: `tilted` has it.
    """

    def __call__(self, samples: Samples) -> Tensor:
        return self.differentiable(samples.media, samples)

    def differentiable(self, media: Tensor, samples: Samples) -> Tensor:
        return -(media - torch.tensor(TARGET).to(media)).square().sum(1) / 2


def tilt(*, steps: int = 20, group: int = 512, beta: float = 0.25) -> Algorithm:
    """Reward-weighted matching on samples of the start: it converges to p(x) exp(r(x) / beta).

    `rwr` with the frozen start as the policy that samples, and no anchor."""
    start = Average("start", Decay(start=1.0))  # an average that never moves
    regression = RECIPES["rwr"](steps=steps, group=group, rate=1 / beta, anchor=0.0)
    return replace(regression, averages=(start,), behaviour="start")


def tilted(beta: float) -> tuple[Tensor, Tensor, float]:
    """The optimum of E[reward] - beta KL, which `tilt` converges to: weights [2] and centres [2 2] of its Gaussians, and
    their standard deviation."""
    centres, target = torch.tensor(CENTRES).double(), torch.tensor(TARGET).double()
    precision = 1 / SPREAD**2 + 1 / beta
    moved = (centres / SPREAD**2 + target / beta) / precision
    away = (centres - target).square().sum(1)
    return (-away / (2 * (SPREAD**2 + beta))).softmax(0), moved, precision**-0.5
