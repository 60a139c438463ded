"""Models, losses and rewards that keep a run from learning, for runs of the flow of points."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.own.points import Closeness, Points, exact_velocity
from flowrl.losses.base import Entries
from flowrl.losses.ratio import Surrogate
from rewards.types import Samples


class Detached(Points):
    """Its network's output has no way back."""

    def forward(self, x: Tensor, sigma: Tensor, encoded: Tensor) -> Tensor:
        return super().forward(x, sigma, encoded).detach()


class NoGradient(Points):
    @torch.no_grad()
    def forward(self, x: Tensor, sigma: Tensor, encoded: Tensor) -> Tensor:
        return super().forward(x, sigma, encoded)


class Unused(Points):
    """Trained weights that nothing reads."""

    def forward(self, x: Tensor, sigma: Tensor, encoded: Tensor) -> Tensor:
        return exact_velocity(x, sigma) + 0.0 * x


class TimesZero(Points):
    """A branch that is multiplied by a gate of 0."""

    def forward(self, x: Tensor, sigma: Tensor, encoded: Tensor) -> Tensor:
        base = exact_velocity(x, sigma)
        return base + 0.0 * (super().forward(x, sigma, encoded) - base)


class Steep(Points):
    """A root of 0: its slope is infinite, and its value is not."""

    def forward(self, x: Tensor, sigma: Tensor, encoded: Tensor) -> Tensor:
        base = super().forward(x, sigma, encoded)
        return base + (base - base.detach()).abs().sqrt()


class Rounded(Points):
    """A step function has no slope."""

    def forward(self, x: Tensor, sigma: Tensor, encoded: Tensor) -> Tensor:
        base = exact_velocity(x, sigma)
        return base + (super().forward(x, sigma, encoded) - base).round()


class Dead(Points):
    """Its last activation is never above 0."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        last = nn.Linear(width, 2, bias=False)
        self.network = nn.Sequential(nn.Linear(6, width), nn.ReLU(), last)
        with torch.no_grad():
            self.network[0].weight.zero_()
            self.network[0].bias.fill_(-1.0)


class Tiny(Points):
    """A branch whose scale is far below Adam's epsilon."""

    def forward(self, x: Tensor, sigma: Tensor, encoded: Tensor) -> Tensor:
        base = exact_velocity(x, sigma)
        return base + 1e-22 * (super().forward(x, sigma, encoded) - base)


class Random(Points):
    """Dropout that evaluation mode does not switch off."""

    def forward(self, x: Tensor, sigma: Tensor, encoded: Tensor) -> Tensor:
        return super().forward(x, sigma, encoded) + 0.3 * torch.randn_like(x)


@dataclass(frozen=True, kw_only=True)
class Weightless(Surrogate):
    """A policy term with the weight 0."""

    low: float = 0.2
    high: float = 0.2

    def __call__(self, likelihood, evaluations, rows) -> Entries:
        entries = super().__call__(likelihood, evaluations, rows)
        return entries._replace(value=0.0 * entries.value)


@dataclass(frozen=True, kw_only=True)
class Loose(Surrogate):
    """Its value is detached from the policy."""

    low: float = 0.2
    high: float = 0.2

    def __call__(self, likelihood, evaluations, rows) -> Entries:
        new = evaluations["new"]
        held = {**evaluations, "new": new._replace(logp=new.logp.detach())}
        entries = super().__call__(likelihood, held, rows)
        return entries._replace(value=entries.value + 0.0 * new.logp)


@dataclass(frozen=True)
class Nothing:
    """A transform that makes every advantage 0."""

    def __call__(self, credit, context):
        return credit._replace(value=0.0 * credit.value)


class PickScoreUnit(Closeness):
    """Scores in the unit of a model whose scores are near 21."""

    def __call__(self, samples: Samples) -> Tensor:
        return 21.0 + super().__call__(samples)

    def differentiable(self, media: Tensor, samples: Samples) -> Tensor:
        return 21.0 + super().differentiable(media, samples)


class Dim(Closeness):
    """Scores whose slope is far below Adam's epsilon."""

    def __call__(self, samples: Samples) -> Tensor:
        return 1e-20 * super().__call__(samples)

    def differentiable(self, media: Tensor, samples: Samples) -> Tensor:
        return 1e-20 * super().differentiable(media, samples)


class FlatAtFirst(Closeness):
    """The same score for all samples of a prompt in its first calls."""

    def __init__(self, calls: int = 4) -> None:
        self.left = calls

    def __call__(self, samples: Samples) -> Tensor:
        self.left -= 1
        found = super().__call__(samples)
        of_prompt = torch.tensor([len(prompt) / 20 - 2.0 for prompt in samples.prompts])
        return of_prompt if self.left >= 0 else found


class Sparse(Closeness):
    """1 near the target, which few samples reach."""

    def __call__(self, samples: Samples) -> Tensor:
        return (super().__call__(samples) > -0.4).double()


class Patchy(Closeness):
    """Some samples have no score."""

    def __call__(self, samples: Samples) -> Tensor:
        found = super().__call__(samples)
        return torch.where(samples.media[:, 0] > 1.6, torch.nan, found)
