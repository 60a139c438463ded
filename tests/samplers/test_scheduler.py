"""The scheduler's kernel, and a kernel's steps where no density is asked."""

import torch

from samplers import CPS, Chain, KernelSteps, Latents, Ode, Plan, Scheduler, euler, roll
from samplers.scheduler import bound_to, unbound
from samplers.walk import Walk

SIGMAS = (1.0, 0.75, 0.5, 0.25, 0.0)
NUMBERS = ((0.9, -0.2, 0.3), (0.8, -0.3, 0.2), (0.7, -0.4, 0.1), (1.0, -0.25, 0.0))
BOUND = Scheduler(NUMBERS, SIGMAS)


def slope(x: torch.Tensor, sigma: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x - sigma[:, None]


def test_steps_are_the_schedulers_numbers_with_the_keyed_noise() -> None:
    """Along a whole walk, whose last step is no noisy one, in plain loops."""
    plan = bound_to(Chain(Scheduler(), 2)(SIGMAS, 0, 0)[0], BOUND)
    (rollout,) = roll((plan,), slope, Latents((3,)), (5,), seed=7, iteration=2)
    walk = Walk(slope, Latents((3,)), (5,), (7, 2))
    x = walk.noise(2, "root")
    for k, (a, b, c) in enumerate(NUMBERS):
        x = a * x + b * (x - SIGMAS[k]) + c * walk.noise(2, "step", 0, k)
    torch.testing.assert_close(rollout.x0, x)
    assert len(rollout.edges) == 3


def test_without_numbers_all_noise_is_fresh() -> None:
    """As CPS at eta 1: x0 is predicted, and noised to the next level."""
    x, v = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).unbind(0)
    at, to = torch.tensor([1.0, 0.9, 0.5, 0.3]), torch.tensor([0.8, 0.5, 0.2, 0.0])
    mean, std = Scheduler()(x, v, at, to)
    torch.testing.assert_close((mean, std), tuple(CPS(1.0)(x, v, at, to)), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mean, (1 - to)[:, None] * euler(x, v, at, torch.zeros(4)))
    assert unbound(Plan(Chain(Scheduler(), 2)(SIGMAS, 0, 0)[0].steps, Scheduler()))


def test_a_kernels_steps_need_no_noisy_plan() -> None:
    """The same samples as a plan whose steps are noisy: noise is keyed by step and node."""
    noisy, alone = Ode(2, kernel=BOUND), Ode(2, KernelSteps(BOUND))
    found = [
        roll(planner(SIGMAS, 0, 0), slope, Latents((3,)), (0, 1), seed=0, iteration=0)[0].x0
        for planner in (noisy, alone)
    ]
    assert torch.equal(*found)
