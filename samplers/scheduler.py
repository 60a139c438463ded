"""The steps of a model's own sampler, as a kernel and as a solver.

Few-step students (LCM, TCD, DMD2, SANA-Sprint) are trained for one sampler. Every step predicts a
clean sample and adds fresh noise to it, so an ODE would sample a different distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from samplers.host import on_host, uploaded
from samplers.kernels import Gaussian, Kernel, lift, per_row, renoise, step
from samplers.plan import Plan
from samplers.solvers import Euler, Plain, Point


@dataclass(frozen=True)
class Scheduler:
    """The step of the pipeline's own scheduler: x0 is predicted, then noised to the next level.

    Formula: x' = a x + b v + c noise, with (a, b, c) of the pipeline's scheduler at each step
    (LCM, arXiv:2310.04378; TCD, arXiv:2402.19159; DMD2, arXiv:2405.14867; SANA-Sprint,
    arXiv:2503.09641)

    A run measures the three numbers with the pipeline's own scheduler (`bound_to`). Until then the
    step counts as x' = (1 - s') x0 + s' noise, s' = sigma_next. The last step draws no noise, so it
    has no density.

    coefficients  (a, b, c) of each step; null, as a run needs it, are measured with the pipeline's
                  scheduler
    sigmas        levels of these steps, from 1 down; null, as a run needs it, are the pipeline's
    """

    affine = True
    coefficients: tuple[tuple[float, float, float], ...] | None = field(default=None, repr=False)
    sigmas: tuple[float, ...] | None = field(default=None, repr=False)

    def __call__(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Gaussian:
        if self.coefficients is None or self.sigmas is None:
            return renoise(x, v, sigma, sigma_next, sigma_next)
        x, v = lift(x), lift(v)
        asked = on_host(sigma)
        levels = torch.tensor(self.sigmas[:-1], dtype=torch.float64).to(asked)
        index = (asked[:, None] - levels).abs().argmin(1)
        numbers = torch.tensor(self.coefficients, dtype=torch.float64)[index].to(x.dtype)
        of_x, of_v, std = uploaded(numbers, x.device).unbind(1)
        return Gaussian(per_row(of_x, x) * x + per_row(of_v, x) * v, std)

    def bound(self, sigmas: Sequence[float]) -> "Scheduler":
        """The kernel itself. ValueError for levels at which it was not measured."""
        if self.sigmas is not None and tuple(sigmas) != self.sigmas:
            raise ValueError(
                "kernel: scheduler works only at its pipeline's own levels, but this plan has "
                "other ones: leave out what changes them (such as flash)"
            )
        return self

    @property
    def placeholder(self) -> bool:
        """Whether the numbers of a scheduler are still missing."""
        return self.coefficients is None


@dataclass(frozen=True)
class KernelSteps(Plain):
    """Steps of a kernel where a plan needs no density.

    Formula: x' = mean + std noise of the kernel
    """

    kernel: Kernel

    @property
    def random(self) -> bool:
        return True

    def __call__(self, at: Point, past: tuple[object, ...]) -> tuple[Tensor, None]:
        del past
        dtype = lift(at.x).dtype
        levels = (
            torch.full((len(at.x),), s, dtype=dtype, device=at.x.device)
            for s in (at.sigma, at.sigma_next)
        )
        mean, std = step(self.kernel, at.x, at.v, *levels)
        return mean + per_row(std, mean) * at.noise(), None


def unbound(plan: Plan) -> bool:
    """Whether a plan takes a scheduler's steps that are not measured yet."""
    return isinstance(plan.kernel, Scheduler) and plan.kernel.placeholder


def bound_to(plan: Plan, kernel: Scheduler) -> Plan:
    """The plan with the scheduler's own steps everywhere: with a density where it is noisy, and
    without one elsewhere.

    ValueError for a plan with another solver, other levels, or a trained step without noise.
    """
    kernel = kernel.bound(plan.sigmas)
    if plan.solver != Euler():
        raise ValueError(
            f"kernel: scheduler already takes all steps: leave out the solver {plan.solver}, or "
            "what brings it (such as flash)"
        )
    return replace(plan, kernel=kernel, solver=KernelSteps(kernel), solve_from=0)
