import gc
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samplers import Chain, ConstantSDE, Latents, Ode, Particled, Sampling, roll
from samplers.routes.particles import FeynmanKac, effective, normalised, systematic
from samplers.routes.steering import SteeredRoute, best, importance, steer_plan
from samplers.walk import Edges
from tests.support.levels import shifted_levels
from tests.support.tiny import Counting, gaussian_velocity

SIGMAS = shifted_levels(30)
POTENTIALS = ["difference", "max", "sum", "terminal"]


def first(x0, prompt):
    return x0[:, 0]


def steered(how, particles=1500, score=first, draws=(0,), **settings):
    plan = Chain(ConstantSDE(0.8), particles)(SIGMAS, 0, 0)[0]
    return steer_plan(
        how, plan, gaussian_velocity, score, Latents((1,)), list(draws), seed=0, **settings
    )


@pytest.mark.quick_cases("sum-True", "terminal-True")
@pytest.mark.long
@pytest.mark.parametrize("adaptive", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("potential", POTENTIALS)
def test_particles_aim_at_the_tilted_data(potential, adaptive):
    """x ~ N(0, 1) weighed with exp(x) is N(1, 1), whatever the potential on the way."""
    out = steered(FeynmanKac((8, 14, 20, 26), 1.0, potential, adaptive=adaptive))
    mean = (out.weight * out.x0[:, 0].double()).sum()
    assert float(mean) == pytest.approx(1.0, abs=0.12)
    spread = (out.weight * (out.x0[:, 0].double() - mean) ** 2).sum().sqrt()
    assert float(spread) == pytest.approx(1.0, abs=0.15)


@pytest.mark.long
@pytest.mark.parametrize("strength", [pytest.param(0.5, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize(
    "potential", [pytest.param(n, marks=[pytest.mark.slow] * (n != "sum")) for n in POTENTIALS]
)
def test_few_particles_do_not_overshoot(potential, strength):
    """64 particles of each of 40 draws: the mean is at most the tilted data's."""
    how = FeynmanKac((8, 14, 20, 26), strength, potential)
    out = steered(how, 64, draws=tuple(range(40)))
    mean = (out.weight * out.x0[:, 0].double()).sum() / 40
    assert 0.85 * strength < float(mean) < 1.1 * strength


def test_each_row_of_weights_is_normalised_alone():
    """A particle of weight 0 stays at 0, also beside a draw whose particles all have weight 0."""
    logs = torch.tensor([[0.0, -math.inf], [-math.inf, -math.inf], [-math.inf, 3.0]])
    assert normalised(logs).tolist() == [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    assert effective(logs).tolist() == [effective(row).item() for row in logs] == [1.0, 2.0, 1.0]


def test_weights_that_were_not_used_are_kept():
    """With a threshold that is never met nothing is drawn anew: plain importance weights."""
    how = FeynmanKac((5, 15), 1.0, "difference", threshold=0.0)
    out = steered(how, 50)
    plain = torch.softmax(out.x0[:, 0].double(), 0)
    torch.testing.assert_close(out.weight, plain)
    assert all(torch.equal(p[0], torch.arange(50)) for p in out.parents)


def test_steering_keeps_no_transitions():
    """A plan whose steps are trained makes some at every step, and particles train on none."""

    def alive():
        return sum(type(thing) is Edges for thing in gc.get_objects())

    before, more = alive(), []

    def score(x0, prompt):
        more.append(alive() - before)
        return x0[:, 0]

    steered(FeynmanKac((8, 20), 1.0, "difference"), 4, score=score)
    assert more == [0, 0, 0]


def test_steering_without_strength_is_roll():
    plan = Chain(ConstantSDE(0.8), 6)(SIGMAS, 0, 0)[0]
    counting = Counting()
    out = steer_plan(
        FeynmanKac((3, 9), 0.0), plan, counting, first, Latents((2,)), [4, 2], seed=7, iteration=5
    )
    (plain,) = roll((plan,), gaussian_velocity, Latents((2,)), [4, 2], seed=7, iteration=5)
    assert torch.equal(out.x0, plain.x0) and torch.equal(out.prompt, plain.prompt)
    assert counting.states == 2 * plan.evaluations


def test_a_draw_is_steered_alone_as_with_others():
    how = FeynmanKac((8, 16), 3.0, adaptive=False)
    whole = steered(how, 8, draws=(5, 3))
    alone = steered(how, 8, draws=(3,))
    assert torch.equal(whole.x0[8:], alone.x0) and torch.equal(
        whole.parents[0][1:], alone.parents[0]
    )


def test_huge_rewards_and_unscored_samples_do_no_harm():
    def score(x0, prompt):
        r = 1e6 * x0[:, 0]
        r[::3] = math.nan
        return r

    out = steered(FeynmanKac((8, 16), 10.0, "difference"), 30, score)
    assert out.x0.isfinite().all() and float(out.weight.sum()) == pytest.approx(1)
    nothing = steered(FeynmanKac((8,), 10.0), 4, lambda x, p: x[:, 0] * math.nan)
    torch.testing.assert_close(nothing.weight, torch.full((4,), 0.25).double())


def test_a_line_is_weighed_by_its_reward_alone():
    """Potentials telescope: with the last weighing the log-weight is strength r(x0)."""
    g = torch.Generator().manual_seed(0)
    rewards = torch.randn(4, 1, 5, generator=g)
    for potential in POTENTIALS:
        how = FeynmanKac((), 2.0, potential, start=-1.5)
        particles = how.begin(1, 5)
        for k, r in enumerate(rewards):
            particles = how.weigh(particles, r, last=k == 3)
        want = torch.softmax(2.0 * rewards[-1].double(), -1)
        torch.testing.assert_close(normalised(particles.log_weight), want)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.floats(0, 0.999), st.integers(1, 12))
def test_systematic_draws_come_in_proportion(log_weights, u, count):
    weights = torch.tensor([log_weights]).double()
    index = systematic(weights, torch.tensor([u]).double(), count)[0]
    counts = torch.bincount(index, minlength=len(log_weights))
    want = count * normalised(weights)[0]
    assert (counts >= (want - 1e-9).floor()).all() and (counts <= (want + 1e-9).ceil()).all()


def test_effective_sample_size():
    assert float(effective(torch.zeros(1, 8))) == pytest.approx(8)
    assert float(effective(torch.tensor([[0.0, -1000.0, -1000.0]]))) == pytest.approx(1)


def test_best_and_importance():
    score = torch.tensor([0.1, 3.0, math.nan, 2.0, 5.0, -1.0, 7.0, 0.0])
    assert best(score, 4).tolist() == [1, 6]
    assert best(score, 4, keep=4).tolist() == [1, 3, 0, 2, 6, 4, 7, 5]
    keys = [(0, 0, 3), (0, 0, 4)]
    assert importance(score, 200.0, keys, keep=2).tolist() == [1, 1, 6, 6]
    even = importance(score.nan_to_num(), 0.0, keys, keep=4)
    assert even.tolist() == list(range(8))


def particled(at=(8, 16), strength=3.0, group=6):
    """Particles in the iterations 2 and 3."""
    how = FeynmanKac(at, strength, adaptive=False)
    return Particled(Ode(group), ConstantSDE(0.8), group, how, 2, 4)


def test_particles_feed_the_iterations_of_a_window():
    planner = particled()
    routes = [planner(SIGMAS, iteration, 0)[0].route for iteration in range(6)]
    kinds = [isinstance(route, SteeredRoute) for route in routes]
    assert planner.later == (routes[2],)
    assert kinds == [False, False, True, True, False, False]
    assert planner(SIGMAS, 0, 0) == Ode(6)(SIGMAS, 0, 0)


def test_particles_are_better_samples_in_groups_and_cost_no_more():
    plans = particled(group=64)(SIGMAS, 2, 0)
    counting = Counting()
    sampling = Sampling(score=lambda rollout: first(rollout.x0, rollout.prompt))
    settings = {"seed": 0, "iteration": 2, "sampling": sampling}
    (rollout,) = roll(plans, counting, Latents((1,)), [7, 3], **settings)
    assert counting.states == 2 * plans[0].evaluations == 2 * 64 * 30
    assert rollout.prompt.tolist() == [0] * 64 + [1] * 64 and rollout.edges == ()
    assert len(rollout.x0.unique()) == len(rollout.x0)  # copies parted again
    assert (rollout.x0.view(2, 64).mean(1) > 0.8).all()  # of N(0, 1), towards N(3, 1)
    (alone,) = roll(plans, gaussian_velocity, Latents((1,)), [3], **settings)
    assert torch.equal(alone.x0, rollout.x0[64:])
