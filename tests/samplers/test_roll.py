from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samplers import (
    DPM2M,
    SA,
    Chain,
    ConstantSDE,
    Flash,
    FlowSDE,
    Fork,
    Frozen,
    Gaussian,
    Latents,
    Ode,
    Plan,
    Sampling,
    Tree,
    Window,
    mean_log_prob,
    roll,
)
from samplers.noise import generator, normal
from samplers.plan import Step, steps_of
from samplers.solvers import Past, Point
from tests.samplers.test_kernels import terminal_variance
from tests.support.levels import shifted_levels
from tests.support.tiny import gaussian_velocity

SIGMAS, SDE = shifted_levels(8, shift=3.0), FlowSDE(0.7)
PLANNERS = [
    Ode(4), Ode(4, DPM2M()), Ode(4, SA()), Chain(SDE, 4), Chain(SDE, 4, shared_noise=True),
    Window(SDE, 4), Window(SDE, 4, 2, Frozen(3), shared_noise=True, flash=Flash()),
    Fork(SDE, 2, roots=2), Tree(ConstantSDE(0.3), (0, 3)),
    Tree(ConstantSDE(0.3), (2,), roots=2, shared_noise=True, split=4.0),
]  # fmt: skip


PLAIN, MEANS, TWO = Sampling(), Sampling(keep_mean=True), Latents((2,))


def rolled(
    planner, draws, iteration=0, seed=0, velocity=gaussian_velocity, latents=TWO, sampling=PLAIN
):
    plans = planner(SIGMAS, iteration, seed)
    return roll(plans, velocity, latents, draws, seed=seed, iteration=iteration, sampling=sampling)


@pytest.mark.parametrize("planner", PLANNERS, ids=str)
def test_every_planner_makes_a_valid_group(planner):
    for iteration in range(0, 400, 57):
        for index, rollout in enumerate(rolled(planner, [4, 0, 9], iteration)):
            assert rollout.x0.shape == (12, 2) and rollout.index == index
            assert rollout.prompt.tolist() == [0] * 4 + [1] * 4 + [2] * 4
            assert rollout.draws == (4, 0, 9) and rollout.iteration == iteration
            for e in rollout.edges:
                assert len(e.x) == len(e.logp) == 3 * rollout.columns.nodes[e.step]
                assert e.prompt.tolist() == sorted(e.prompt.tolist())


@pytest.mark.parametrize("planner", PLANNERS, ids=str)
def test_a_draw_is_the_same_alone_or_with_others(planner):
    """To the bit, edges included, so it does not depend on the number of processes either."""
    whole = rolled(planner, [5, 3, 9])
    for rank, ids in enumerate(([5], [3, 9])):
        for a, b in zip(whole, rolled(planner, ids), strict=True):
            group, rows = a.plan.group, slice(0, 1) if rank == 0 else slice(1, 3)
            assert torch.equal(a.x0.view(3, group, 2)[rows].reshape(-1, 2), b.x0)
            for e, f in zip(a.edges, b.edges, strict=True):
                assert torch.equal(e.logp.view(3, -1)[rows].flatten(), f.logp)
                assert torch.equal(e.x_next.view(3, -1, 2)[rows].reshape(-1, 2), f.x_next)
    firsts = torch.stack([a.x0[:: a.plan.group] for a in whole])
    assert len(firsts[0].unique(dim=0)) == 3  # draws have their own noise


@pytest.mark.parametrize("planner", PLANNERS, ids=str)
def test_seed_and_iteration_key_the_noise(planner):
    same, other = rolled(planner, [5])[0].x0, rolled(planner, [5], seed=1)[0].x0
    assert torch.equal(same, rolled(planner, [5])[0].x0)
    assert not torch.isclose(same, other).any()
    plans = planner(SIGMAS, 0, 0)
    later = roll(plans, gaussian_velocity, TWO, [5], seed=0, iteration=1)[0].x0
    assert not torch.isclose(same, later).any()


def test_noise_is_keyed_as_the_contract_says():
    """Root: (seed, iteration, draw, "root", node); steps: (.., "step", plan, step, node)."""
    plans = Fork(SDE, 2)(SIGMAS, 6, 0)
    second = roll(plans, gaussian_velocity, TWO, [11], seed=3, iteration=6, sampling=MEANS)[1]
    (edge,) = second.edges
    std = second.columns.std[edge.step]
    got = (edge.x_next - edge.mean) / std
    want = normal([(3, 6, 11, "step", 1, 1, node) for node in range(2)], (2,))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    first = roll(plans, gaussian_velocity, TWO, [11], seed=3, iteration=6)[0].edges[0]
    assert torch.equal(first.x[:1], normal([(3, 6, 11, "root", 0)], (2,)))


@pytest.mark.slow
@given(st.lists(st.integers(0, 10**9) | st.text(max_size=5), min_size=1, max_size=4))
def test_a_key_is_a_stream(key):
    first = torch.randn(4, generator=generator(*key))
    assert torch.equal(first, torch.randn(4, generator=generator(*key)))
    assert not torch.equal(first, torch.randn(4, generator=generator(*key, 0)))


def test_numbers_and_words_are_different_keys():
    assert generator(1).initial_seed() != generator("1").initial_seed()
    assert generator(1, 23).initial_seed() != generator(12, 3).initial_seed()


def test_edges_hold_what_the_step_did():
    """x is the parent once a child, and logp the density of the stored next state."""
    planner = Tree(ConstantSDE(0.3), (1, 3), (2, 3))
    (rollout,) = rolled(planner, [5, 6], sampling=MEANS)
    assert rollout.plan.nodes == (1, 2, 2, 6, 6, 6, 6, 6)
    for e in rollout.edges:
        step, branch = rollout.plan.steps[e.step], rollout.plan.steps[e.step].branch
        assert torch.equal(e.x, e.x[::branch].repeat_interleave(branch, 0))
        at, to = (torch.full((len(e.x),), s) for s in (step.sigma, step.sigma_next))
        v = gaussian_velocity(e.x, at, e.prompt)
        g = ConstantSDE(0.3)(e.x, v, at, to)
        torch.testing.assert_close(e.mean, g.mean)
        torch.testing.assert_close(e.logp, mean_log_prob(g, e.x_next))
        siblings = e.x_next.view(-1, branch, 2)
        assert branch == 1 or (siblings[:, :1] != siblings[:, 1:]).all()


def test_a_step_goes_on_from_what_it_stored_and_copies_nothing():
    (rollout,) = rolled(Chain(SDE, 3), [5])
    for e, after in zip(rollout.edges, rollout.edges[1:], strict=False):
        assert after.x is e.x_next  # branch is 1: one state, kept once
        assert e.mean is None


def test_a_bfloat16_rollout_scores_the_state_that_it_stores():
    (rollout,) = rolled(
        Chain(SDE, 64), [5], latents=Latents((2,), dtype=torch.bfloat16), sampling=MEANS
    )
    for e in rollout.edges:
        assert e.x_next.dtype == torch.bfloat16 and e.logp.dtype == torch.float32
        std = torch.full((64,), rollout.columns.std[e.step])
        again = mean_log_prob(Gaussian(e.mean, std), e.x_next)
        torch.testing.assert_close(e.logp, again, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("planner", PLANNERS, ids=str)
def test_float64_is_float32_with_more_digits(planner):
    precise = rolled(planner, [5], latents=Latents((2,), dtype=torch.float64))
    for a, b in zip(rolled(planner, [5]), precise, strict=True):
        assert b.x0.dtype == torch.float64
        torch.testing.assert_close(a.x0.double(), b.x0, rtol=1e-4, atol=1e-5)


def test_plans_share_their_trunk_and_their_roots():
    """Each plan of a fork alone gives what it gives with the others."""
    plans = Fork(SDE, 3, roots=2)(SIGMAS, 0, 0)
    together = roll(plans, gaussian_velocity, TWO, [1, 2], seed=0, iteration=0)
    first = {e.step: e.x for r in together for e in r.edges}
    trunk = roll(Ode(2)(SIGMAS, 0, 0), gaussian_velocity, TWO, [1, 2], seed=0, iteration=0)
    for k, rollout in enumerate(together):
        assert torch.equal(first[k], rollout.edges[0].x)
        rest = steps_of((*SIGMAS[k:],))
        x = first[k][::3]  # the four parents on the trunk, down by Euler to the ODE's sample
        for s in rest:
            v = gaussian_velocity(x, torch.full((4,), s.sigma), rollout.prompt)
            x = x - (s.sigma - s.sigma_next) * v
        torch.testing.assert_close(x, trunk[0].x0)
    assert len({tuple(r.x0.flatten().tolist()) for r in together}) == len(plans)


def test_roots_with_one_noise_part_at_the_first_noisy_step():
    window = Window(SDE, 4, 2, Frozen(3), shared_noise=True)
    (rollout,) = rolled(window, [5, 6])
    first = rollout.edges[0]
    assert torch.equal(first.x, first.x[::4].repeat_interleave(4, 0))
    assert len(rollout.x0.unique(dim=0)) == 8
    own = rolled(Window(SDE, 4, 2, Frozen(3)), [5, 6])[0].edges[0]
    assert torch.equal(own.x[::4], first.x[::4])  # node 0 has the shared noise
    assert len(own.x.unique(dim=0)) == 8


def test_a_flash_window_is_reached_by_euler_and_left_by_its_solver():
    """The window's steps and what comes before are those without Flash; history is fed by all."""
    flash, plain = (
        rolled(Window(SDE, 4, 2, Frozen(3), flash=f), [5])[0] for f in (Flash(1.0), None)
    )
    assert flash.plan.sigmas == plain.plan.sigmas
    for e, f in zip(flash.edges, plain.edges, strict=True):
        assert torch.equal(e.x, f.x) and torch.equal(e.x_next, f.x_next)
    x, past = plain.edges[-1].x_next, plain.edges[-1].x
    level = lambda x, s: gaussian_velocity(x, torch.full((4,), s), plain.prompt)
    history = (Past(SIGMAS[4], past, past - SIGMAS[4] * level(past, SIGMAS[4])),)
    for a, b in pairwise(SIGMAS[5:]):
        point = Point(x, level(x, a), a, b, level, lambda: torch.zeros(4, 2))
        x, history = DPM2M()(point, history)[0], (point.past,)
    torch.testing.assert_close(flash.x0, x)
    assert not torch.isclose(flash.x0, plain.x0).any()


@pytest.mark.parametrize("split", [None, 0.5, 4.0])
def test_split_noise_is_standard_and_correlates_siblings_only(split):
    """(xi_0 + s eta) / sqrt(1 + s^2): variance 1, correlation 1 / (1 + s^2) between siblings."""
    planner = Tree(ConstantSDE(0.3), (1, 2), roots=2, split=split)
    (rollout,) = roll(
        planner(SIGMAS, 0, 0), gaussian_velocity, Latents((20_000,)), [0], seed=0, iteration=0,
        sampling=MEANS,
    )  # fmt: skip
    edge = next(e for e in rollout.edges if e.step == 2)
    noise = (edge.x_next - edge.mean) / rollout.columns.std[2]
    correlation = noise @ noise.T / 20_000
    want = torch.eye(8)
    for i in range(0, 8, 2):
        want[i, i + 1] = want[i + 1, i] = 0 if split is None else 1 / (1 + split**2)
    torch.testing.assert_close(correlation, want, rtol=0, atol=0.03)
    std = torch.full((8,), rollout.columns.std[2])
    torch.testing.assert_close(edge.logp, mean_log_prob(Gaussian(edge.mean, std), edge.x_next))


def test_roll_draws_what_the_recursion_says():
    """Per step: the empirical variance of 40,000 numbers against the exact linear recursion."""
    sigmas = shifted_levels(9)
    plans = Chain(FlowSDE(), 2)(sigmas, 0, 0)
    (rollout,) = roll(plans, gaussian_velocity, Latents((20_000,)), [0], seed=0, iteration=0)
    assert float(rollout.x0.var()) == pytest.approx(terminal_variance(FlowSDE(), 9), abs=0.02)


def test_the_velocity_sees_the_level_and_the_draws_place():
    seen = []

    def velocity(x, sigma, prompt):
        seen.append((sigma, prompt))
        return gaussian_velocity(x, sigma, prompt)

    rolled(Ode(2), [8, 7], velocity=velocity)
    for (sigma, prompt), want in zip(seen, SIGMAS, strict=False):
        assert sigma.shape == (4,) and (sigma == torch.tensor(want)).all()
        assert prompt.tolist() == [0, 0, 1, 1]


def test_a_velocity_beside_the_trained_steps_reaches_no_density():
    """Two plans share their first state; the first one takes its step without a density."""
    steps = lambda train: tuple(
        Step(a, b, noisy=k in train, train=k in train) for k, (a, b) in enumerate(pairwise(SIGMAS))
    )
    plans = [Plan(steps(train), SDE, roots=2) for train in ({1}, {0}, {2, 3})]
    inside, calls = [False], []

    def velocity(x, sigma, prompt):
        calls.append(inside[0])
        return gaussian_velocity(x, sigma, prompt) + 5.0 * inside[0]

    @contextmanager
    def aside():
        assert not inside[0]
        inside[0] = True
        yield
        inside[0] = False

    options = Sampling(keep_mean=True, aside=aside)
    found = roll(plans, velocity, TWO, (0, 1), seed=0, iteration=0, sampling=options)
    for edge in (edge for rollout in found for edge in rollout.edges):
        at, to = (torch.full((4,), SIGMAS[k]) for k in (edge.step, edge.step + 1))
        v = gaussian_velocity(edge.x, at, edge.prompt)
        torch.testing.assert_close(edge.mean, SDE.bound(SIGMAS)(edge.x, v, at, to).mean)
    assert any(calls) and not all(calls)
    calls.clear()
    roll([Ode(2)(SIGMAS, 0, 0)[0]], velocity, TWO, (0,), seed=0, iteration=0, sampling=options)
    assert all(calls) and not inside[0]
