from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.contrib.fdfo import Churn
from flowrl.likelihoods.matching import weighting
from samplers import (
    CPS,
    DDIM,
    DDPM,
    ConstantSDE,
    FlowSDE,
    Gaussian,
    WanSDE,
    euler,
    mean_log_prob,
)
from samplers.adapt import (
    flow_velocity,
    level,
    scale,
    to_vp,
)
from samplers.kernels import coefficients, per_row, step
from tests.support.levels import shifted_levels
from tests.support.tiny import gaussian_velocity

AT = torch.tensor([1.0, 0.9, 0.5, 0.1], dtype=torch.float64)
TO = torch.tensor([0.9, 0.7, 0.3, 0.05], dtype=torch.float64)
KERNELS = [
    FlowSDE(0.7), ConstantSDE(0.3), CPS(0.5), WanSDE(0.96), DDIM(0.6), DDPM(), DDPM("large"),
]  # fmt: skip


def xv(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return (torch.randn(4, 3, 2, 2, generator=g, dtype=dtype) for _ in range(2))


@pytest.mark.parametrize("kernel", [*KERNELS, Churn(0.2)], ids=repr)
def test_coefficients_are_the_kernels_step(kernel):
    """What a GPU computes with: the means of a unit state and of a unit velocity."""
    x, v = xv()
    kernel = kernel.bound([*AT.tolist(), 0.0])
    found = coefficients(kernel, AT.float(), TO.float())
    assert found is not None and found.dtype == torch.float64
    of_x, of_v, std = found
    mean, own = kernel(x, v, AT.float().double(), TO.float().double())
    torch.testing.assert_close(per_row(of_x, x) * x + per_row(of_v, x) * v, mean)
    torch.testing.assert_close(std, own)


def test_only_linear_kernels_of_known_levels_have_coefficients():
    class Clips(FlowSDE):
        affine = False

    assert coefficients(Clips(), AT, TO) is None
    assert coefficients(FlowSDE(), AT.to("meta"), TO.to("meta")) is None
    x, v = xv()
    found, own = step(FlowSDE(), x, v, AT, TO), FlowSDE()(x, v, AT, TO)
    assert all(torch.equal(a, b) for a, b in zip(found, own, strict=True))


def test_flow_sde_is_equation_9_of_flow_grpo():
    x, v = xv()
    t, t2 = AT.view(-1, 1, 1, 1), TO.view(-1, 1, 1, 1)
    dt = t2 - t
    std = torch.sqrt(t / (1 - torch.where(t == 1, t2, t))) * 0.7
    mean = x * (1 + std**2 / (2 * t) * dt) + v * (1 + std**2 * (1 - t) / (2 * t)) * dt
    got = FlowSDE(0.7)(x, v, AT, TO)
    torch.testing.assert_close(got.mean, mean)
    torch.testing.assert_close(got.std, (std * (-dt).sqrt()).flatten())


def test_flow_sde_near_pure_noise_is_as_at_pure_noise():
    """Wan's .9997 and AWM's .999: the formula itself would give a std of 5 and of 3."""
    x, v = xv()
    for sigma in (1.0, 0.9997, 0.999):
        at, to = torch.full((4,), sigma).double(), torch.full((4,), 0.98).double()
        std = FlowSDE(0.7)(x, v, at, to).std
        assert (std > 0.6).all() and (std <= 0.7 + 1e-9).all()


def test_constant_sde_is_dance_grpos_step():
    x, v = xv()
    t, t2 = AT.view(-1, 1, 1, 1), TO.view(-1, 1, 1, 1)
    x0 = x - t * v
    score = -(x - x0 * (1 - t)) / t**2
    mean = x + (t2 - t) * v - 0.5 * 0.3**2 * score * (t2 - t)
    got = ConstantSDE(0.3)(x, v, AT, TO)
    torch.testing.assert_close(got.mean, mean)
    torch.testing.assert_close(got.std, 0.3 * (AT - TO).sqrt())


def test_wan_binds_the_second_level():
    kernel = WanSDE().bound((0.9997, 0.9, 0.0))
    assert kernel == WanSDE(0.9) == kernel.bound((1.0, 0.5, 0.0))
    x, v = xv()
    torch.testing.assert_close(kernel(x, v, AT, TO).std, 0.9 * AT * (AT - TO).sqrt())


@pytest.mark.parametrize("kernel", [FlowSDE(), ConstantSDE(), CPS(), DDIM(), DDPM()], ids=str)
def test_other_kernels_do_not_bind(kernel):
    assert kernel.bound((1.0, 0.5, 0.0)) is kernel


@pytest.mark.parametrize(
    "kernel", [FlowSDE(0.0), ConstantSDE(0.0), CPS(0.0), WanSDE(0.0), DDIM(0.0)], ids=str
)
def test_without_noise_every_kernel_is_euler(kernel):
    x, v = xv()
    got = kernel(x, v, AT, TO)
    torch.testing.assert_close(got.mean, euler(x, v, AT, TO))
    assert not got.std.any()


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_rows_of_one_call_may_stand_at_different_levels(kernel):
    x, v = xv()
    whole = kernel(x, v, AT, TO)
    for i in range(4):
        row = kernel(x[i : i + 1], v[i : i + 1], AT[i : i + 1], TO[i : i + 1])
        assert torch.equal(row.mean[0], whole.mean[i]) and torch.equal(row.std[0], whole.std[i])


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_bfloat16_is_lifted_before_it_is_used(kernel):
    x, v = (a.bfloat16() for a in xv())
    got = kernel(x, v, AT.float(), TO.float())
    want = kernel(x.double(), v.double(), AT, TO)
    assert got.mean.dtype == got.std.dtype == torch.float32
    torch.testing.assert_close(got.mean.double(), want.mean, rtol=1e-5, atol=1e-5)
    logp = mean_log_prob(got, x)
    torch.testing.assert_close(logp.double(), mean_log_prob(want, x.double()), rtol=1e-4, atol=1e-4)


@given(st.floats(0.05, 3.0), st.integers(1, 5))
def test_mean_log_prob_is_the_normal_density(spread, dims):
    x, v = xv()
    g = Gaussian(x[:, :, 0, :dims], spread * torch.tensor([0.1, 0.5, 1.0, 2.0]).double())
    std = g.std.view(-1, 1, 1).expand_as(g.mean)
    at = v[:, :, 0, :dims]
    expected = torch.distributions.Normal(g.mean, std).log_prob(at).flatten(1).mean(1)
    torch.testing.assert_close(mean_log_prob(g, at), expected)


def terminal_variance(kernel, steps: int) -> float:
    """Exact: with data N(0, 1) every step is linear in x, so variances just recur."""
    sigmas = shifted_levels(steps)
    kernel = kernel.bound(sigmas)
    variance, prompt = 1.0, torch.zeros(1, dtype=torch.long)
    one = torch.ones(1, 1, dtype=torch.float64)
    for k, pair in enumerate(pairwise(sigmas)):
        at, to = (torch.tensor([s], dtype=torch.float64) for s in pair)
        v = gaussian_velocity(one, at, prompt)
        if k == steps - 1:  # the last step is deterministic, as in plans
            return float(euler(one, v, at, to)) ** 2 * variance
        mean, std = kernel(one, v, at, to)
        variance = float(mean) ** 2 * variance + float(std) ** 2
    raise AssertionError


SDES = [FlowSDE(0.7), FlowSDE(1.0), ConstantSDE(0.3), WanSDE(), DDIM(0.5), DDIM(1.0)]


@pytest.mark.parametrize("kernel", [FlowSDE(0.7), ConstantSDE(0.3), DDIM(1.0), DDPM()], ids=str)
def test_an_sde_keeps_the_marginals(kernel):
    coarse, fine = (abs(terminal_variance(kernel, steps) - 1) for steps in (400, 1600))
    assert fine < 0.006 and coarse < 0.02 and fine < coarse


def test_cps_does_not():
    """Its noise does not shrink with the step, so more steps do not bring the variance to 1."""
    assert 0.84 < terminal_variance(CPS(0.5), 400) < terminal_variance(CPS(0.5), 1600) < 0.86


def test_cps_keeps_the_noise_level():
    """Given a clean sample and noise, x_next is at sigma_next whatever eta: in this it is DDIM."""
    x0, noise = xv()
    at = AT.view(-1, 1, 1, 1)
    for kernel in (CPS(0.3), CPS(1.0), DDIM(0.7), DDPM()):
        mean, std = kernel((1 - at) * x0 + at * noise, noise - x0, AT, TO)
        left = mean - (1 - TO).view(-1, 1, 1, 1) * x0
        amount = (left / noise).flatten(1)[:, 0].square() + std**2
        torch.testing.assert_close(amount, TO**2)


# The diffusion process, by itself: alphas_cumprod of a cosine schedule at two times.
ABAR = torch.cos(0.5 * torch.pi * torch.tensor([0.98, 0.7, 0.5, 0.1]).double()) ** 2
ABAR_NEXT = torch.cos(0.5 * torch.pi * torch.tensor([0.9, 0.5, 0.3, 0.02]).double()) ** 2


def in_vp(kernel, x, epsilon) -> Gaussian:
    """A flow kernel's step of a VP state and noise prediction, as the VP state's Gaussian."""
    at, to = level(ABAR), level(ABAR_NEXT)
    x0 = (x - per_row((1 - ABAR).sqrt(), x) * epsilon) / per_row(ABAR.sqrt(), x)
    mean, std = kernel(x / per_row(scale(at), x), epsilon - x0, at, to)
    return Gaussian(mean * per_row(scale(to), x), std * scale(to))


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_is_equation_12_of_its_paper(eta):
    x, epsilon = xv()
    a, b = (t.view(-1, 1, 1, 1) for t in (ABAR, ABAR_NEXT))
    std = eta * ((1 - b) / (1 - a)).sqrt() * (1 - a / b).sqrt()
    x0 = (x - (1 - a).sqrt() * epsilon) / a.sqrt()
    mean = b.sqrt() * x0 + (1 - b - std**2).sqrt() * epsilon
    got = in_vp(DDIM(eta), x, epsilon)
    torch.testing.assert_close(got.mean, mean)
    torch.testing.assert_close(got.std, std.flatten())


def test_ddpm_is_the_posterior_of_the_forward_process():
    """Bayes: q(next) from the forward step a -> b and the predicted clean sample."""
    x, epsilon = xv()
    a, b = (t.view(-1, 1, 1, 1) for t in (ABAR, ABAR_NEXT))
    x0 = (x - (1 - a).sqrt() * epsilon) / a.sqrt()
    beta = 1 - a / b
    mean = b.sqrt() * beta / (1 - a) * x0 + (1 - beta).sqrt() * (1 - b) / (1 - a) * x
    small, large = in_vp(DDPM(), x, epsilon), in_vp(DDPM("large"), x, epsilon)
    torch.testing.assert_close(small.mean, mean)
    torch.testing.assert_close(large.mean, mean)
    torch.testing.assert_close(small.std, ((1 - b) / (1 - a) * beta).sqrt().flatten())
    torch.testing.assert_close(large.std, beta.sqrt().flatten())


ALPHAS_CUMPROD = torch.cumprod(1 - torch.linspace(1e-3, 0.03, 200), 0).double()


def test_every_parametrisation_gives_one_velocity():
    """Round trip in float64: predictions made from one (x0, noise) all mean noise - x0."""
    x0, noise = xv()
    times = torch.tensor([199, 120, 60, 3])
    abar = ALPHAS_CUMPROD[times]
    alpha, s = per_row(abar.sqrt(), x0), per_row((1 - abar).sqrt(), x0)
    sigma = level(abar)
    flow = (1 - per_row(sigma, x0)) * x0 + per_row(sigma, x0) * noise
    x = to_vp(flow, sigma)
    torch.testing.assert_close(x, alpha * x0 + s * noise)
    predictions = {"epsilon": noise, "v_prediction": alpha * noise - s * x0, "sample": x0}
    for kind, prediction in predictions.items():
        torch.testing.assert_close(flow_velocity(kind, x, prediction, sigma), noise - x0)


def test_an_epsilon_loss_is_a_weighted_velocity_loss():
    x0, noise = xv()
    times = torch.tensor([199, 120, 60, 3])
    sigma = level(ALPHAS_CUMPROD[times])
    flow = (1 - per_row(sigma, x0)) * x0 + per_row(sigma, x0) * noise
    wrong = noise + 0.1 * x0.flip(0)
    v = flow_velocity("epsilon", to_vp(flow, sigma), wrong, sigma)
    square = lambda a: a.square().flatten(1).mean(1)
    velocity_error = square(v - (noise - x0))[:, None]
    torch.testing.assert_close(
        square(wrong - noise), weighting("epsilon")(velocity_error, sigma)[:, 0]
    )
