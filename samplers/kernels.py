"""One denoising step as a Gaussian, x_next ~ N(mean, std^2 I).

Convention of the whole repository (rectified flow, arXiv:2209.03003):

    x_sigma = (1 - sigma) x0 + sigma noise          sigma in [0, 1]; 1 is pure noise
    v       = d x_sigma / d sigma = noise - x0      the prediction of a flow model

Sampling walks sigma downwards, so h = sigma - sigma_next > 0.
Shapes: n rows, `*d` the latent's own dims; sigma is one number per row, and rows may differ.
The arithmetic is float32 or better: a bfloat16 velocity is converted before use.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from samplers.host import host_copy, remembered, sent, uploaded
from samplers.layout import Layout
from samplers.number_ranges import AT_LEAST_0, FROM_0_TO_1, FROM_0_TO_2

# From here up a level counts as pure noise: Wan's list starts at .9997 and AWM's at .999, while no
# published list has a second level above .9986 (shift 7, 100 steps).
PURE_NOISE = 0.9989


class Gaussian(NamedTuple):
    """The std is one number per row; per entry [n d] for kernels that treat parts of a flat state
    differently (`samplers.clock`), where entries with 0 are not drawn."""

    mean: Float[Tensor, "n *d"]
    std: Float[Tensor, "n *e"]


@runtime_checkable
class Kernel(Protocol):
    """A stochastic denoising step; each kernel is a frozen dataclass.

    `bound` returns the kernel for one list of noise levels. It is the kernel itself unless the
    formula needs the list (`WanSDE`). The std depends on the levels alone. A kernel whose mean is
    linear in state and velocity says so: `SaysAffine`.
    """

    def __call__(
        self,
        x: Float[Tensor, "n *d"],
        v: Float[Tensor, "n *d"],
        sigma: Float[Tensor, " n"],
        sigma_next: Float[Tensor, " n"],
    ) -> Gaussian: ...

    def bound(self, sigmas: Sequence[float]) -> "Kernel": ...


@runtime_checkable
class SaysAffine(Protocol):
    """A kernel that says whether its mean is a x + b v, with numbers a and b of the levels alone.

    One that clips the predicted clean sample, for example, is not. A kernel that says nothing
    counts as one that is not.
    """

    @property
    def affine(self) -> bool: ...


def is_affine(kernel: Kernel) -> bool:
    """Whether a kernel says that its mean is a x + b v."""
    return isinstance(kernel, SaysAffine) and kernel.affine


def per_row(a: Float[Tensor, "n *e"], x: Float[Tensor, "n *d"]) -> Tensor:
    """One number per row, shaped to broadcast over the row; numbers per entry as they are."""
    return a.view(-1, *[1] * (x.ndim - 1)) if a.ndim == 1 else a


def lift(a: Tensor) -> Tensor:
    """Convert to float32; float64 stays float64."""
    return a.to(torch.promote_types(a.dtype, torch.float32))


def step(
    kernel: Kernel,
    x: Float[Tensor, "n *d"],
    v: Float[Tensor, "n *d"],
    sigma: Float[Tensor, " n"],
    sigma_next: Float[Tensor, " n"],
) -> Gaussian:
    """The kernel's distribution. On a GPU that of an affine kernel takes two operations (see
    `coefficients`) and equals the kernel's own up to float32 rounding. On a CPU, and for other
    kernels, it is the kernel's own to the bit."""
    exact = None if x.device.type == "cpu" else coefficients(kernel, sigma, sigma_next)
    if exact is None:
        return kernel(x, v, sigma, sigma_next)
    x, v = lift(x), lift(v)
    numbers = exact.to(x.dtype)
    of_x, of_v, std = sent(numbers, x.device)
    mean = torch.addcmul(per_row(of_x, x) * x, per_row(of_v, x), v)
    return Gaussian(mean, remembered(std, numbers[2]))


def coefficients(
    kernel: Kernel, sigma: Float[Tensor, " n"], sigma_next: Float[Tensor, " n"]
) -> Float[Tensor, "3 n"] | None:
    """(a, b, std) of an affine kernel, whose mean is a x + b v, in float64 on the CPU. None for
    other kernels, and for levels that the host does not know."""
    levels = [host_copy(level) for level in (sigma, sigma_next)]
    if not is_affine(kernel) or any(s is None for s in levels):
        return None
    at, to = (level.double() for level in levels if level is not None)
    one, zero = torch.ones_like(at), torch.zeros_like(at)
    of_x, std = kernel(one, zero, at, to)
    return torch.stack([of_x, kernel(zero, one, at, to).mean, std])


def euler(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Float[Tensor, "n *d"]:
    """The deterministic (probability-flow) step, x - h v."""
    x, v = lift(x), lift(v)
    return x - per_row(sigma - sigma_next, x) * v


def clean_and_noise(x: Tensor, v: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Predicted clean sample and noise of a state with velocity v: (x0, noise), both [n *d]."""
    x, v = lift(x), lift(v)
    at = per_row(sigma, x)
    return x - at * v, x + (1 - at) * v


def reverse_sde(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, g: Tensor) -> Gaussian:
    """Euler-Maruyama step on dx = (v - g^2/2 grad log p) dsigma + g dw, which keeps the flow's
    marginals.

    For a rectified flow grad log p = -noise_hat / sigma, with noise_hat = x + (1 - sigma) v.
    """
    h = sigma - sigma_next
    grad_log_p = -clean_and_noise(x, v, sigma)[1] / per_row(sigma, x)
    mean = euler(x, v, sigma, sigma_next) + per_row(0.5 * g**2 * h, x) * grad_log_p
    return Gaussian(mean, g * h.sqrt())


def renoise(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor, std: Tensor) -> Gaussian:
    """Combine the predicted clean sample and noise at the next level, with fresh noise of `std`.

    The predicted noise has the factor sqrt(sigma_next^2 - std^2): DDIM's step (arXiv:2010.02502,
    eq. 12) on a rectified flow.
    """
    x0, noise = clean_and_noise(x, v, sigma)
    keep = (sigma_next**2 - std**2).clamp_min(0).sqrt()  # rounding, where all of it is fresh noise
    return Gaussian(per_row(1 - sigma_next, x) * x0 + per_row(keep, x) * noise, std)


Same = TypeVar("Same")


class AnyLevels:
    """A kernel whose formula needs no list of noise levels."""

    def bound(self: Same, sigmas: Sequence[float]) -> Same:
        return self


@dataclass(frozen=True)
class FlowSDE(AnyLevels):
    """Flow-GRPO's kernel, g = eta sqrt(sigma / (1 - sigma)): arXiv:2505.05470, eq. 8-9.

    Formula: x' = x - h (v + g^2 noise_hat / (2 sigma)) + g sqrt(h) noise,
    noise_hat = x + (1 - sigma) v, g = eta sqrt(sigma / (1 - sigma))

    At sigma = 1, where g is infinite, 1 - sigma is taken at the next level, as published: the
    std is then eta exactly. The same is done just below 1 (`PURE_NOISE`), where the formula would
    draw noise of many times the data's size.

    eta  noise of a step, at least 0; more explores more, and makes samples rougher
    """

    affine = True
    eta: float = 0.7

    def __post_init__(self) -> None:
        AT_LEAST_0.check("FlowSDE's eta", self.eta)

    def __call__(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Gaussian:
        finite = torch.where(sigma > PURE_NOISE, sigma_next, sigma)
        return reverse_sde(x, v, sigma, sigma_next, self.eta * (sigma / (1 - finite)).sqrt())


@dataclass(frozen=True)
class ConstantSDE(AnyLevels):
    """DanceGRPO's kernel, g = eta: arXiv:2505.07818.

    Formula: x' = x - h (v + g^2 noise_hat / (2 sigma)) + g sqrt(h) noise,
    noise_hat = x + (1 - sigma) v, g = eta

    eta  noise of a step, g itself, at least 0; more explores more, and makes samples rougher
    """

    affine = True
    eta: float = 0.3

    def __post_init__(self) -> None:
        AT_LEAST_0.check("ConstantSDE's eta", self.eta)

    def __call__(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Gaussian:
        return reverse_sde(x, v, sigma, sigma_next, torch.full_like(sigma, self.eta))


@dataclass(frozen=True)
class WanSDE:
    """Kernel of Flow-GRPO's code for Wan 2.1: g = sigma_max sigma, where sigma_max is the list's
    second level.

    Formula: x' = x - h (v + g^2 noise_hat / (2 sigma)) + g sqrt(h) noise,
    noise_hat = x + (1 - sigma) v, g = sigma_max sigma

    There is no noise level to set. A call raises a ValueError before `bound` has set `sigma_max`.

    sigma_max  factor of the noise, in [0, 1]; null, as a run needs it, is the list's second level
    """

    affine = True
    sigma_max: float | None = None

    def __post_init__(self) -> None:
        FROM_0_TO_1.check("WanSDE's sigma_max", self.sigma_max)

    def __call__(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Gaussian:
        if self.sigma_max is None:
            raise ValueError("WanSDE is not bound to noise levels: call kernel.bound(sigmas) first")
        return reverse_sde(x, v, sigma, sigma_next, self.sigma_max * sigma)

    def bound(self, sigmas: Sequence[float]) -> "WanSDE":
        if self.sigma_max is not None:
            return self
        if len(sigmas) < 2:
            raise ValueError("WanSDE needs a list of at least two noise levels")
        return replace(self, sigma_max=float(sigmas[1]))


@dataclass(frozen=True)
class CPS(AnyLevels):
    """Coefficients-preserving step with std = sigma_next sin(eta pi / 2): Flow-CPS,
    arXiv:2509.05952.

    Formula: x' = (1 - s') x0 + sqrt(s'^2 - std^2) noise_hat + std noise, s' = sigma_next,
    std = s' sin(eta pi / 2)

    The std is largest at eta = 1, falls again up to eta = 2, and would be negative above.
    The level of x_next is sigma_next whatever eta, but this is no SDE: its noise does not shrink
    with the step, and the samples' variance stays short of the data's however many steps there are.

    eta  noise of a step, in [0, 2]; largest at 1
    """

    affine = True
    eta: float = 0.7

    def __post_init__(self) -> None:
        FROM_0_TO_2.check("CPS's eta", self.eta)

    def __call__(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Gaussian:
        std = sigma_next * math.sin(0.5 * math.pi * self.eta)
        return renoise(x, v, sigma, sigma_next, std)


def _ancestral(sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
    """(std of DDPM's posterior at x_next, share of fresh noise 1 - abar / abar_next).

    With n = sqrt((1-s)^2 + s^2), a flow's level s is the variance-preserving alpha = (1-s)/n and
    sigma = s/n (`adapt.py`); abar = alpha^2, and the std is divided by alpha_next + sigma_next.
    """
    noise = sigma**2 / ((1 - sigma) ** 2 + sigma**2)  # 1 - abar
    noise_next = sigma_next**2 / ((1 - sigma_next) ** 2 + sigma_next**2)
    fresh = (noise - noise_next) / (1 - noise_next)
    return sigma_next * (fresh / noise).sqrt(), fresh


@dataclass(frozen=True)
class DDIM(AnyLevels):
    """DDIM with noise `eta` (arXiv:2010.02502, eq. 12 and 16), for models trained on epsilon or v.

    Formula: x' = (1 - s') x0 + sqrt(s'^2 - std^2) noise_hat + std noise, s' = sigma_next,
    std = eta s' sqrt((1 - abar / abar') / (1 - abar))

    States are the flow's, x / (alpha + sigma): see `adapt.py`. DDPO (arXiv:2305.13301) and
    DanceGRPO's diffusion path use eta = 1.

    eta  noise of a step, at least 0; 0 is deterministic, 1 is DDPM's small variance
    """

    affine = True
    eta: float = 1.0

    def __post_init__(self) -> None:
        AT_LEAST_0.check("DDIM's eta", self.eta)

    def __call__(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Gaussian:
        std = self.eta * _ancestral(sigma, sigma_next)[0]
        return renoise(x, v, sigma, sigma_next, std)


@dataclass(frozen=True)
class DDPM(AnyLevels):
    """DDPM's posterior mean (arXiv:2006.11239, eq. 7) with the small or the large variance.

    "small" is the posterior's own variance, which is DDIM at eta = 1; "large" is that of the
    forward step, 1 - abar / abar_next. States are the flow's, as in `DDIM`.

    variance  variance of a step's noise: the posterior's own (`small`), or the forward step's
              (`large`)
    """

    affine = True
    variance: Literal["small", "large"] = "small"

    def __call__(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Gaussian:
        small, fresh = _ancestral(sigma, sigma_next)
        mean, _ = renoise(x, v, sigma, sigma_next, small)
        if self.variance == "small":
            return Gaussian(mean, small)
        scale = ((1 - sigma_next) ** 2 + sigma_next**2).sqrt()  # 1 / (alpha + sigma) there
        return Gaussian(mean, scale * fresh.sqrt())


def mean_log_prob(
    g: Gaussian,
    x_next: Float[Tensor, "n *d"],
    free: Bool[Tensor, "n *d"] | None = None,
    layout: Layout | None = None,
) -> Float[Tensor, "n ..."]:
    """log N(x_next; mean, std^2 I) averaged (not summed) over the latent's dims.

    Averaging divides log-ratios by the latent's size; the published clip ranges (1e-5 to 1e-3)
    only make sense with it. With `free` the mean is over these entries alone, with `layout` one per
    part [n p]. A step without noise (std = 0) has no density: do not call this for it.
    On a GPU, for stds that the host knows, the mean is taken first: three operations on latents.
    """
    if g.std.ndim > 1:
        drawn = g.std > 0
        free = drawn if free is None else drawn & free
        g = Gaussian(g.mean, torch.where(drawn, g.std, torch.ones_like(g.std)))
    elif g.mean.device.type != "cpu" and (known_std := host_copy(g.std)) is not None:
        logs = -known_std.double().log() - 0.5 * math.log(2 * math.pi)
        ends = torch.stack([logs, -0.5 / known_std.double().square()]).to(g.mean.dtype)
        away = mean_over((lift(x_next) - g.mean).square(), free, layout)
        offset, factor = (per_row(number, away) for number in uploaded(ends, away.device))
        return torch.addcmul(offset, factor, away)
    std = per_row(g.std, x_next)
    z = (lift(x_next) - g.mean) / std
    return mean_over(-0.5 * z**2 - std.log() - 0.5 * math.log(2 * math.pi), free, layout)


def mean_over(
    values: Float[Tensor, "n *d"],
    free: Bool[Tensor, "n *d"] | None,
    layout: Layout | None = None,
) -> Float[Tensor, "n ..."]:
    """Means per row, over free entries if not all are; with `layout`, per row and part [n p]."""
    if free is None:
        return values.flatten(1).mean(1) if layout is None else layout.means(values)
    counted = torch.where(free, values, torch.zeros_like(values))
    if layout is not None:  # a part without such entries has 0
        counts = layout.means(free.to(counted))
        return layout.means(counted) / torch.where(counts > 0, counts, torch.ones_like(counts))
    return counted.flatten(1).sum(1) / free.flatten(1).sum(1)
