"""Solvers: steps without a density. All but Euler remember past steps or evaluate the model twice.

A solver is a frozen dataclass. It gets the `Point` that it starts from and its history of earlier
steps, newest first, including noisy steps; it returns the next state and the new history. Levels
are plain floats here: all rows of a rollout are at the same level.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from samplers.number_ranges import AT_LEAST_0, FROM_0_TO_1


class Past(NamedTuple):
    """A previous step, as multistep solvers remember it."""

    sigma: float
    x: Tensor  # the state that it left from, [n *d]
    x0: Tensor  # the clean sample that was predicted there, [n *d]
    noise: Tensor | None = None  # what the solver drew in it, [n *d]

    def rows(self, parent: Tensor) -> "Past":
        """The same history for the children of a branch."""
        noise = None if self.noise is None else self.noise[parent]
        return Past(self.sigma, self.x[parent], self.x0[parent], noise)


@dataclass(frozen=True)
class Point:
    """The start of a step: x and v are [n *d], and v is the velocity of x at sigma."""

    x: Tensor
    v: Tensor
    sigma: float
    sigma_next: float
    velocity: Callable[[Tensor, float], Tensor]  # one more evaluation, at (x, sigma)
    noise: Callable[[], Tensor]  # this step's keyed standard normal, [n *d]

    @property
    def past(self) -> Past:
        return Past(self.sigma, self.x, self.x - self.sigma * self.v)


@runtime_checkable
class Solver(Protocol):
    @property
    def memory(self) -> int: ...  # number of past steps that it reads
    @property
    def random(self) -> bool: ...  # whether it draws noise of its own
    def evaluations(self, sigma_next: float) -> int: ...  # network evaluations of a step to there
    def __call__(self, at: Point, past: tuple[Past, ...]) -> tuple[Tensor, Past | None]:
        """(next state, the new history in place of `at.past`)."""
        ...


class Plain:
    """Default behaviour of a solver: one evaluation per step, no history, no noise."""

    @property
    def memory(self) -> int:
        return 0

    @property
    def random(self) -> bool:
        return False

    def evaluations(self, sigma_next: float) -> int:
        return 1


@dataclass(frozen=True)
class Euler(Plain):
    """Euler's method.

    Formula: x' = x - h v
    """

    def __call__(self, at: Point, past: tuple[Past, ...]) -> tuple[Tensor, None]:
        return at.x - (at.sigma - at.sigma_next) * at.v, None


@dataclass(frozen=True)
class Heun(Plain):
    """The trapezoidal rule, with a second evaluation at the end of Euler's step. Second order.

    Formula: x' = x - h (v(x, s) + v(x - h v, s')) / 2

    The step to sigma = 0 is Euler's, since models are not trained there.
    """

    def evaluations(self, sigma_next: float) -> int:
        return 2 if sigma_next > 0 else 1

    def __call__(self, at: Point, past: tuple[Past, ...]) -> tuple[Tensor, None]:
        h = at.sigma - at.sigma_next
        x = at.x - h * at.v
        if at.sigma_next > 0:
            x = at.x - 0.5 * h * (at.v + at.velocity(x, at.sigma_next))
        return x, None


def log_snr(sigma: float) -> float:
    """Log signal-to-noise ratio lambda = log((1 - sigma) / sigma), from -inf at pure noise to inf
    at a clean sample."""
    if sigma == 1:
        return -math.inf
    return math.inf if sigma == 0 else math.log((1 - sigma) / sigma)


def multistep(at: Point, past: tuple[Past, ...], order: int, heun: bool = False) -> Tensor:
    """DPM-Solver++ (arXiv:2211.01095, Algorithm 2) for a rectified flow, alpha = 1 - sigma.

    Order 1 is Euler's step. A level of 1 among the nodes is infinitely far in lambda, so its
    difference vanishes and the order drops automatically. `heun` weighs the second-order term by
    its exact integral instead of a half.
    """
    s, t = at.sigma, at.sigma_next
    snr = log_snr(s)
    h = log_snr(t) - snr
    decay = (1 - s) * t / (s * (1 - t))  # exp(-h), also at s = 1 and at t = 0
    m0 = at.past.x0
    out = (t / s) * at.x + (1 - t) * (1 - decay) * m0
    nodes = past[: order - 1]
    if not nodes or t == 0 or s == 1:
        return out
    r0 = (snr - log_snr(nodes[0].sigma)) / h
    d = (m0 - nodes[0].x0) / r0
    exact = (decay - 1) / h + 1
    if len(nodes) == 1:
        return out + (1 - t) * (exact if heun else 0.5 * (1 - decay)) * d
    r1 = (log_snr(nodes[0].sigma) - log_snr(nodes[1].sigma)) / h
    older = (nodes[0].x0 - nodes[1].x0) / r1
    first = d + r0 / (r0 + r1) * (d - older)
    second = (d - older) / (r0 + r1)
    return out + (1 - t) * (exact * first - ((decay - 1 + h) / h**2 - 0.5) * second)


@dataclass(frozen=True)
class DPM2M(Plain):
    """DPM-Solver++ 2M. First order without history and in the step to sigma = 0.

    From sigma = 1 the second step is first order too. DiffusionNFT samples with it.

    Formula: x' = (s' / s) x + (1 - s') (1 - e^-h) (x0 + (x0 - x0_before) / (2 r)), h the step in
    log-SNR, r the previous step over h

    heun  whether the second-order term has the weight of its exact integral; else that of the
          midpoint
    """

    heun: bool = False

    @property
    def memory(self) -> int:
        return 1

    def __call__(self, at: Point, past: tuple[Past, ...]) -> tuple[Tensor, None]:
        return multistep(at, past, 2, self.heun), None


@dataclass(frozen=True)
class DPM3M(Plain):
    """DPM-Solver++ 3M. The order is lower while the history is short and in the step to sigma = 0.

    As published, its second difference is half the second derivative, so it converges with order 2,
    from a smaller error than 2M's.
    """

    @property
    def memory(self) -> int:
        return 2

    def __call__(self, at: Point, past: tuple[Past, ...]) -> tuple[Tensor, None]:
        return multistep(at, past, 3), None


@dataclass(frozen=True)
class SA(Plain):
    """SA-Solver (arXiv:2309.05019), predictor and corrector of order 2, one evaluation per step.

    Its noise is `noise` for steps that end in [low, high], else 0. The corrector repeats the
    previous step with the prediction at its end and the same noise; the first step is not
    corrected, and the last step returns the predicted clean sample. AWM's rollouts
    (arXiv:2509.25050) use it.

    noise  noise of the steps that end in [low, high], at least 0; 0 is deterministic
    low    lowest level, in [0, 1], at which a noisy step ends
    high   highest level, in [0, 1], at which a noisy step ends, at least `low`
    """

    noise: float = 0.4
    low: float = 0.3
    high: float = 0.9

    def __post_init__(self) -> None:
        AT_LEAST_0.check("SA's noise", self.noise)
        FROM_0_TO_1.check("SA's low", self.low)
        FROM_0_TO_1.check("SA's high", self.high)
        if self.low > self.high:
            raise ValueError(
                f"SA's noise is for steps that end in [low, high], which is empty: low {self.low} "
                f"must be at most high {self.high}"
            )

    @property
    def memory(self) -> int:
        return 1

    @property
    def random(self) -> bool:
        return self.noise > 0

    def __call__(self, at: Point, past: tuple[Past, ...]) -> tuple[Tensor, Past]:
        point = at.past
        before = past[0] if past else None
        if before is not None and before.noise is not None:
            point = point._replace(x=self.step(before, at.sigma, (point, before)))
        if at.sigma_next == 0:
            return point.x0, point
        point = point._replace(noise=at.noise() if self.random else torch.zeros_like(at.x))
        if before is None or before.sigma == 1:  # first order, and not to be corrected
            return self.step(point, at.sigma_next, (point,)), point._replace(noise=None)
        return self.step(point, at.sigma_next, (point, before)), point

    def step(self, start: Past, sigma_next: float, nodes: tuple[Past, ...]) -> Tensor:
        """Step from `start` to sigma_next, given the predictions at the nodes."""
        assert start.noise is not None
        tau2 = self.noise**2 if self.low <= sigma_next <= self.high else 0.0
        h = log_snr(sigma_next) - log_snr(start.sigma)
        decay = math.exp(-tau2 * h) if tau2 else 1.0
        x = decay * (sigma_next / start.sigma) * start.x
        for node, weight in zip(nodes, _weights(h, 1 + tau2, sigma_next, nodes), strict=True):
            x = x + (1 + tau2) * (1 - sigma_next) * weight * node.x0
        return x + sigma_next * math.sqrt(1 - decay**2) * start.noise


def _weights(h: float, k: float, sigma_next: float, nodes: tuple[Past, ...]) -> tuple[float, ...]:
    """Integrals of exp(k (lambda - lambda_next)) times each node's Lagrange polynomial.

    With two nodes SA-Solver's code adds a term of order h^3 for few steps, and so do we, to
    reproduce its samples.
    """
    decay = math.exp(-k * h)  # 0 from pure noise, where h is infinite
    flat = (1 - decay) / k
    if len(nodes) == 1:
        return (flat,)
    a, b = (log_snr(node.sigma) - log_snr(sigma_next) for node in nodes)
    slope = (decay * (1 + k * h) - 1) / k**2
    late = (h * k - 1 + decay) / k**2
    extra = h / 2 - late / h if a == 0 else (h**2 / 2 - late) / (a - b)
    return (slope - b * flat) / (a - b) + extra, (slope - a * flat) / (b - a) - extra
