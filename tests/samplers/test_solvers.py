"""Deterministic steps on data N(m, s^2), where the flow's path is known."""

import math
from itertools import pairwise

import pytest
import torch

from samplers import DPM2M, DPM3M, SA, Euler, Heun, Latents, Ode, Plan, roll
from samplers.plan import steps_of
from samplers.solvers import Past, Point, Solver, log_snr, multistep

MEAN, SPREAD = 0.7, 0.5


def velocity(x, sigma):
    """E[noise - x0 | x] for x0 ~ N(MEAN, SPREAD^2), sigma a float or a tensor."""
    variance = (1 - sigma) ** 2 * SPREAD**2 + sigma**2
    x0 = MEAN + (1 - sigma) * SPREAD**2 / variance * (x - (1 - sigma) * MEAN)
    return (x - x0) / sigma


def exact(x, sigma: float, to: float):
    """The probability-flow path keeps (x - mean) / std."""
    std = lambda s: math.sqrt((1 - s) ** 2 * SPREAD**2 + s**2)
    return (1 - to) * MEAN + (x - (1 - sigma) * MEAN) * std(to) / std(sigma)


def walk(solver: Solver, sigmas, x, past: tuple[Past, ...] = ()):
    noise = lambda: torch.zeros_like(x)
    for a, b in pairwise(sigmas):
        point = Point(x, velocity(x, a), a, b, velocity, noise)
        x, new = solver(point, past)
        past = (new or point.past, *past)[: solver.memory]
    return x


def even_in_log_snr(steps: int, start: float = 0.95, end: float = 0.05):
    """From two steps before `start`: what a multistep method remembers."""
    a, b = log_snr(start), log_snr(end)
    return [1 / (1 + math.exp(a + (b - a) * k / steps)) for k in range(-2, steps + 1)]


@pytest.mark.parametrize(
    ("solver", "order"),
    [(Euler(), 1), (Heun(), 2), (DPM2M(), 2), (DPM2M(heun=True), 2), (DPM3M(), 2), (SA(0.0), 2)],
    ids=str,
)
def test_order_of_convergence(solver, order):
    """Halving the steps divides the error by 2^order, given an exact history.

    DPM3M is of second order as published: its second difference is half of what order 3 needs.
    """
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    want, errors = exact(x, 0.95, 0.05), []
    for steps in (80, 160):
        older, old, *sigmas = even_in_log_snr(steps)
        known = [(s, exact(x, 0.95, s)) for s in (old, older)]
        past = tuple(Past(s, y, y - s * velocity(y, s)) for s, y in known)[: solver.memory]
        errors.append(float((walk(solver, sigmas, x, past) - want).abs().max()))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.35)


def test_dpm_of_first_order_is_euler():
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    for a, b in ((1.0, 0.9), (0.8, 0.3), (0.2, 0.0)):
        point = Point(x, velocity(x, a), a, b, velocity, lambda: x)
        torch.testing.assert_close(multistep(point, (), 1), Euler()(point, ())[0])


def test_dpm_is_of_first_order_from_noise_without_history_and_into_the_clean_sample():
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    other = Past(1.0, x, 0 * x + 5)
    for a, b, past in (
        (1.0, 0.9, ()),
        (0.9, 0.8, (other,)),
        (0.2, 0.0, (other._replace(sigma=0.4),)),
    ):
        point = Point(x, velocity(x, a), a, b, velocity, lambda: x)
        for solver in (DPM2M(), DPM3M(), DPM2M(heun=True)):
            torch.testing.assert_close(solver(point, past)[0], Euler()(point, ())[0])


def test_higher_order_is_nearer_with_few_steps():
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    sigmas = [
        1.0,
        *(3 * t / (1 + 2 * t) for t in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)),
        0.0,
    ]
    want = exact(x, 1.0, 0.0)
    error = {s: float((walk(s, sigmas, x) - want).abs().max()) for s in (Euler(), Heun(), DPM2M())}
    assert max(error[DPM2M()], error[Heun()]) < 0.75 * error[Euler()]


def model(x, sigma, prompt):
    return velocity(x, sigma.view(-1, 1))


def shifted(steps: int):
    return tuple(3 * t / (1 + 2 * t) for t in (1 - k / steps for k in range(steps + 1)))


SIGMAS = shifted(14)


@pytest.mark.parametrize("noise", [0.0, pytest.param(0.4, marks=pytest.mark.slow), 1.0])
def test_sa_solver_draws_the_data(noise):
    """Mean and spread of 40,000 numbers: stochastic steps keep the marginals."""
    (rollout,) = roll(
        Ode(2, SA(noise))(shifted(160), 0, 0), model, Latents((20_000,)), [0], seed=0, iteration=0
    )
    assert float(rollout.x0.mean()) == pytest.approx(MEAN, abs=0.01)
    assert float(rollout.x0.std()) == pytest.approx(SPREAD, abs=0.01)


def test_sa_noise_is_keyed_and_only_inside_its_range():
    def ends(solver, draws=(3, 4), seed=0):
        plans = Ode(2, solver)(SIGMAS, 0, 0)
        return roll(plans, model, Latents((1,)), list(draws), seed=seed, iteration=0)[0].x0

    whole = ends(SA(0.7))
    assert torch.equal(whole[2:], ends(SA(0.7), (4,)))
    assert not torch.equal(whole, ends(SA(0.7), seed=1))
    assert torch.equal(ends(SA(0.7, low=0.99, high=1.0)), ends(SA(0.0)))
    assert (whole - ends(SA(0.0))).abs().min() > 1e-3


def test_roots_that_share_their_noise_part_where_a_solver_draws():
    plan = Plan(steps_of(SIGMAS), roots=3, shared_noise=True, solver=SA(0.7))
    (rollout,) = roll((plan,), model, Latents((1,)), [0], seed=0, iteration=0)
    assert len(rollout.x0.unique()) == 3
    still = Plan(steps_of(SIGMAS), roots=3, shared_noise=True, solver=SA(0.0))
    (rollout,) = roll((still,), model, Latents((1,)), [0], seed=0, iteration=0)
    assert rollout.x0.shape == (3, 1) and len(rollout.x0.unique()) == 1
