"""A plan's steps as numbers: what a sampler elsewhere needs to take them.

Every affine kernel and most solvers take steps of one form. A sampler that knows this form alone
needs no kernel and no solver of ours.
"""

from dataclasses import dataclass
from typing import NoReturn

import torch
from jaxtyping import Float
from torch import Tensor

from samplers.kernels import Gaussian, coefficients, mean_log_prob
from samplers.solvers import Past, Point, Solver
from samplers.step_tree import StepTree

_EXACT = 1e-9  # relative error of a step that is computed from its numbers in float64


@dataclass(frozen=True)
class AffineStep:
    """One step from states x at `sigma` to the next states, for velocities v = noise - x0 at
    x = (1 - sigma) x0 + sigma noise.

        mean   = of_x x + of_v v + of_clean clean
        x_next = mean + std noise

    `clean` is x - sigma v of the step before. `std` is 0 for a step without noise, and `of_clean`
    for all but multistep solvers.
    """

    sigma: float
    sigma_next: float
    of_x: float
    of_v: float
    of_clean: float = 0.0
    std: float = 0.0

    def mean(
        self, x: Float[Tensor, "n *d"], v: Float[Tensor, "n *d"], clean: Tensor | None = None
    ) -> Float[Tensor, "n *d"]:
        """The mean of the next states. `clean`: of the step before; None at the first step."""
        mean = self.of_x * x + self.of_v * v
        if self.of_clean == 0 or clean is None:
            return mean
        return mean + self.of_clean * clean

    def log_density(
        self, mean: Float[Tensor, "n *d"], x_next: Float[Tensor, "n *d"]
    ) -> Float[Tensor, " n"]:
        """The log-density of next states, as a mean over their dimensions:
        -(x_next - mean)^2 / 2 std^2 - log std - log(2 pi) / 2. For steps with noise."""
        std = torch.full((len(mean),), self.std, dtype=mean.dtype, device=mean.device)
        return mean_log_prob(Gaussian(mean, std), x_next)


def affine_steps(plan: StepTree) -> tuple[AffineStep, ...]:
    """The steps of a plan. ValueError, with the part that is to blame, for steps of another
    form."""
    affine = list[AffineStep]()
    for k, step in enumerate(plan.steps):
        if step.noisy:
            affine.append(_noisy(plan, k))
        else:
            before = plan.steps[k - 1].sigma if k and plan.solver.memory else None
            affine.append(_solved(plan.solver_at(k), step.sigma, step.sigma_next, before))
    return tuple(affine)


def _noisy(plan: StepTree, k: int) -> AffineStep:
    step = plan.steps[k]
    assert plan.kernel is not None, "a noisy step has a kernel"
    at, to = (torch.tensor([s], dtype=torch.float64) for s in (step.sigma, step.sigma_next))
    numbers = coefficients(plan.kernel, at, to)
    if numbers is None:
        raise ValueError(
            f"the mean of the kernel {type(plan.kernel).__name__} is not a x + b v with numbers a "
            "and b of the noise levels"
        )
    of_x, of_v, std = (float(number) for number in numbers[:, 0])
    return AffineStep(step.sigma, step.sigma_next, of_x, of_v, 0.0, std)


class _Asks(Exception):
    """A solver asked for more than a step of this form has."""


def _more(*_: object) -> NoReturn:
    raise _Asks


def _solved(solver: Solver, sigma: float, sigma_next: float, before: float | None) -> AffineStep:
    """A solver's step, from its answers to unit vectors: x, v, the clean sample of the step before,
    and the state that it left from."""

    def answer(x: Tensor, v: Tensor, clean: Tensor, left: Tensor) -> Tensor:
        past = () if before is None else (Past(before, left, clean),)
        x_next, remembered = solver(Point(x, v, sigma, sigma_next, _more, _more), past)
        if remembered is not None:  # a history of its own, which may change earlier steps
            raise _Asks
        return x_next

    name = type(solver).__name__
    try:
        numbers = answer(*torch.eye(4, dtype=torch.float64))
        draws = torch.Generator().manual_seed(0)
        trial = torch.randn(4, 8, generator=draws, dtype=torch.float64)
        off = (answer(*trial) - numbers @ trial).abs().max()
    except _Asks:
        raise ValueError(
            f"a step of the solver {name} needs more than the velocity at its start"
        ) from None
    of_x, of_v, of_clean, of_left = (float(number) for number in numbers)
    if solver.memory > 1 or of_left != 0:
        raise ValueError(f"the solver {name} remembers more than the last clean sample")
    if not off <= _EXACT * (1 + numbers.abs().sum()):
        raise ValueError(f"a step of the solver {name} is not linear in states and velocities")
    return AffineStep(sigma, sigma_next, of_x, of_v, of_clean)
