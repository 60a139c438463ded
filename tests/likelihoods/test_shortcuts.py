"""LeapAlign and FlowBP against plain loops written from the papers, in float64."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.likelihoods.pathwise import Pathwise
from flowrl.likelihoods.rows import Evaluation
from flowrl.likelihoods.shortcuts import Shortcuts, lagrange
from flowrl.recipes import RECIPES
from samplers import Latents, Plan, Rollout, roll
from samplers.routes.keeping import KeepingRoute, bridge_of, kept_states, kept_steps
from samplers.routes.tails import SomeSteps, TwoLeaps, evenly_spaced
from tests.likelihoods.test_pathwise import EXACT, Net, reward, slope

LEVELS = [1.0, 0.95, 0.88, 0.8, 0.66, 0.5, 0.35, 0.15, 0.0]
DRAWN = {"seed": 3, "iteration": 5}
PROMPT = torch.tensor([0, 0, 1, 1])


def sampled(plan: Plan, net: Net) -> Rollout:
    (made,) = roll((plan,), net, Latents((3,), dtype=torch.float64), (4, 7), **DRAWN)
    return made


def trajectory(net: Net, made: Rollout) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All states and velocities of the samples, by Euler steps from their first states."""
    first = Plan(made.plan.steps, roots=2, route=KeepingRoute((0,)))
    states, velocities = [kept_states(sampled(first, net))[0]], []
    with torch.no_grad():
        for level, after in pairwise(LEVELS):
            velocities.append(speed(net, states[-1], level))
            states.append(states[-1] + (after - level) * velocities[-1])
    torch.testing.assert_close(states[-1], made.x0, **EXACT)
    return states, velocities


def speed(net: Net, x: torch.Tensor, level: float) -> torch.Tensor:
    return net(x, torch.full((len(x),), level, dtype=torch.float64), PROMPT)


def loss_of(name: str, net: Net, planner: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The recipe's weighted hinge loss on these samples, and its gradient."""
    algorithm = RECIPES[name](steps=8, group=2, bound=2.5, **more)
    (plan,) = planner(LEVELS, DRAWN["iteration"], DRAWN["seed"])
    made = sampled(plan, net)
    points = torch.ones(4, 8)
    (rows,) = algorithm.likelihood.rows(made, points, points.bool())
    path = algorithm.likelihood.path(net, rows)
    torch.testing.assert_close(path.x0.detach(), made.x0, rtol=0, atol=0)
    says = {"new": Evaluation(reward(path.x0)[:, None], None)}
    value = algorithm.loss(
        algorithm.likelihood, says, replace(rows, weight=path.weight)
    ).value.sum()
    return value.detach(), slope(net, value)


@pytest.mark.parametrize("active", [1, 2, 3])
def test_shortcuts_evaluate_several_velocities_once_more_for_gradients(active):
    net, likelihood = Net(), Pathwise(Shortcuts("euler"))
    (plan,) = SomeSteps(2, active)(LEVELS, 5, 3)
    points = torch.ones(4, 8)
    (rows,) = likelihood.rows(sampled(plan, net), points, points.bool())
    net.calls = 0
    path = likelihood.path(net, rows)
    assert net.calls == active
    slope(net, reward(path.x0).sum())
    assert net.calls == (active if active == 1 else 2 * active)


def held(x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """A prediction with the value of the real state: LeapAlign's connector, eq. 6 and 7."""
    return x + (real - x).detach()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", [3, 8])
def test_leap_align_is_the_papers_equations(alpha, seed, monkeypatch):
    monkeypatch.setitem(DRAWN, "seed", seed)
    net, planner = Net(), TwoLeaps(2)
    (plan,) = planner(LEVELS, 5, seed)
    k, j = kept_steps(plan)
    x, _ = trajectory(net, sampled(plan, net))
    s_k, s_j = LEVELS[k], LEVELS[j]
    x_jk = x[k] - (s_k - s_j) * speed(net, x[k], s_k)  # eq. 4
    x_j = held(x_jk, x[j])
    x_0j = x_j - s_j * speed(net, alpha * x_j + (1 - alpha) * x_j.detach(), s_j)  # eq. 9
    x_0 = held(x_0j, x[-1])
    d_j, d_0 = ((a - b).abs().mean(1).detach() for a, b in ((x[j], x_jk), (x[-1], x_0j)))
    weight = 1 / (d_j.clamp(min=1e-3) + d_0.clamp(min=1e-3))  # eq. 12
    want = (weight * (2.5 - reward(x_0)).clamp(min=0)).sum()  # eq. 11 and 13
    got = loss_of("leap_align", net, planner, alpha=alpha, tau=1e-3)
    torch.testing.assert_close(got[0], want.detach(), **EXACT)
    torch.testing.assert_close(got[1], slope(net, want), **EXACT)
    assert weight.std() > 0 or seed == 3, "the weights of seed 8 differ"


def composed(net: Net, start: torch.Tensor, cached: list, own: dict, factor: float, ends: range):
    """Euler steps with cached velocities, and the active ones with a scaled gradient."""
    x = start
    for i in ends:
        v = cached[i]
        if i in own:
            v = own[i].detach() + factor * (own[i] - own[i].detach())
        x = x + (LEVELS[i + 1] - LEVELS[i]) * v
    return x


@pytest.mark.parametrize("rescale", [0.0, 0.5, 1.0])
def test_flow_bp_sparse_is_an_euler_sum_with_some_gradients(rescale):
    net, planner = Net(), SomeSteps(2, 3, 1.0)
    (plan,) = planner(LEVELS, 5, 3)
    x, cached = trajectory(net, sampled(plan, net))
    own = {i: speed(net, x[i], LEVELS[i]) for i in kept_steps(plan)}
    covered = sum(LEVELS[i] - LEVELS[i + 1] for i in kept_steps(plan))
    factor = 1 + rescale * (1 / covered - 1)
    x_0 = held(composed(net, x[0], cached, own, factor, range(8)), x[-1])
    want = (2.5 - reward(x_0)).clamp(min=0).sum()
    got = loss_of("flow_bp", net, planner, active=3, late=1.0, rescale=rescale)
    torch.testing.assert_close(got[0], want.detach(), **EXACT)
    torch.testing.assert_close(got[1], slope(net, want), **EXACT)


@pytest.mark.parametrize("seed", [1, 3, 6])
def test_flow_bp_bridge_has_one_nested_gradient(seed, monkeypatch):
    monkeypatch.setitem(DRAWN, "seed", seed)
    net, planner = Net(), SomeSteps(2, 4, 2.0, split=True)
    (plan,) = planner(LEVELS, 5, seed)
    x, cached = trajectory(net, sampled(plan, net))
    j, alpha = bridge_of(plan), 0.4
    assert j in kept_steps(plan) and min(kept_steps(plan)) < j
    factor = 1 + 0.5 * (1 / sum(LEVELS[i] - LEVELS[i + 1] for i in kept_steps(plan)) - 1)
    own = {i: speed(net, x[i], LEVELS[i]) for i in kept_steps(plan) if i < j}
    x_j = held(composed(net, x[0], cached, own, factor, range(j)), x[j])
    mixed = alpha * x_j + (1 - alpha) * x_j.detach()
    own = {i: speed(net, mixed if i == j else x[i], LEVELS[i]) for i in kept_steps(plan) if i >= j}
    x_0 = held(composed(net, x_j, cached, own, factor, range(j, 8)), x[-1])
    want = (2.5 - reward(x_0)).clamp(min=0).sum()
    got = loss_of("flow_bp", net, planner, active=4, late=2.0, rescale=0.5, bridge=alpha)
    torch.testing.assert_close(got[0], want.detach(), **EXACT)
    torch.testing.assert_close(got[1], slope(net, want), **EXACT)


def moments(points: list[float], start: float, end: float) -> np.ndarray:
    """Weights that integrate 1, s, s^2 ... exactly: another way to Lagrange's."""
    powers = np.arange(len(points))
    whole = (end ** (powers + 1) - start ** (powers + 1)) / (powers + 1)
    return np.linalg.solve(np.array([np.array(points) ** p for p in powers]), whole)


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_flow_bp_lagrange_is_leap_align_with_integrated_leaps(seed, monkeypatch):
    monkeypatch.setitem(DRAWN, "seed", seed)
    spread = (4.0, 4.0, 0.5)
    net, planner = Net(), TwoLeaps(2, 3, spread)
    (plan,) = planner(LEVELS, 5, seed)
    x, cached = trajectory(net, sampled(plan, net))
    k, j = kept_steps(plan)[0], bridge_of(plan)
    alpha, second, rescale = 0.6, 0.25, 0.5

    def leap(start: int, end: int, base: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        steps = evenly_spaced(start, end, 3)
        weights = moments([LEVELS[i] for i in steps], LEVELS[start], LEVELS[end])
        factor = 1 + rescale * (abs(weights).sum() / abs(weights[:2]).sum() - 1)
        total = base
        for place, (i, w) in enumerate(zip(steps, weights, strict=True)):
            v = cached[i]
            if place == 0:
                v = first.detach() + factor * (first - first.detach())
            elif place == 1:
                again = speed(net, x[i], LEVELS[i])
                v = again.detach() + factor * second * (again - again.detach())
            total = total + w * v
        return total

    x_jk = leap(k, j, x[k], speed(net, x[k], LEVELS[k]))
    x_j = held(x_jk, x[j])
    mixed = alpha * x_j + (1 - alpha) * x_j.detach()
    x_0j = leap(j, 8, x_j, speed(net, mixed, LEVELS[j]))
    x_0 = held(x_0j, x[-1])
    d_j, d_0 = ((a - b).abs().mean(1).detach() for a, b in ((x[j], x_jk), (x[-1], x_0j)))
    weight = 1 / (d_j.clamp(min=1e-4) + d_0.clamp(min=1e-4))
    want = (weight * (2.5 - reward(x_0)).clamp(min=0)).sum()
    own = {"alpha": alpha, "second": second, "tau": 1e-4, "rescale": rescale}
    got = loss_of("flow_bp_lagrange", net, planner, **own, spread=spread, reach=None)
    torch.testing.assert_close(got[0], want.detach(), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(got[1], slope(net, want), rtol=1e-7, atol=1e-8)


def test_higher_orders_leap_closer():
    """A cubic velocity is integrated exactly by four of its values, and badly by one."""
    steps, weights = lagrange(LEVELS, 1, 7, 4)
    value = sum(w * LEVELS[i] ** 3 for i, w in zip(steps, weights, strict=True))
    assert value == pytest.approx((LEVELS[7] ** 4 - LEVELS[1] ** 4) / 4)
    assert lagrange(LEVELS, 2, 6, 1) == ([2], [LEVELS[6] - LEVELS[2]])
    assert [evenly_spaced(2, 8, m) for m in (1, 2, 3, 9)] == [
        [2], [2, 7], [2, 4, 7], [2, 3, 4, 5, 6, 7]
    ]  # fmt: skip


def plans(planner: Any, count: int = 400) -> list[Plan]:
    levels = [1 - i / 25 for i in range(26)]
    return [planner(levels, i, 0)[0] for i in range(count)]


def test_leaps_reach_every_step():
    pairs = Counter((kept_steps(plan)[0], bridge_of(plan)) for plan in plans(TwoLeaps(1)))
    assert {k for k, _ in pairs} >= set(range(15)) and max(j for _, j in pairs) == 24
    assert all(k < j for k, j in pairs)
    mean = sum(j * n for (_, j), n in pairs.items()) / 400
    assert mean == pytest.approx(26 * 2 / 3 - 1, abs=1.0)  # the later of two different steps
    late = plans(TwoLeaps(1, 3, (2.5, 6.0, 2.0), reach=10))
    ends = [
        (kept_steps(plan)[0], bridge_of(plan) - kept_steps(plan)[0], 25 - bridge_of(plan))
        for plan in late
    ]
    means = np.mean(ends, 0)
    # shares 2.0, 6.0 and 2.5 of 10.5, of 25 steps; the later part is cut at 10
    assert means == pytest.approx([25 * 2 / 10.5 - 1, 25 * 6 / 10.5, 25 * 2.5 / 10.5 + 1], abs=1.0)
    assert max(end for _, _, end in ends) == 10 and min(k for k, _, _ in ends) == 0
    assert all(kept_steps(plan)[-1] < 25 for plan in late)


def test_active_steps_are_late_and_a_bridge_is_one_of_them():
    counts = Counter(k for plan in plans(SomeSteps(1, 4, 1.0)) for k in kept_steps(plan))
    early, last = (sum(counts[k] for k in part) for part in (range(12), range(13, 25)))
    assert last > 2 * early > 0 and sum(counts.values()) == 1600
    even = Counter(k for plan in plans(SomeSteps(1, 4, 0.0)) for k in kept_steps(plan))
    assert abs(sum(even[k] for k in range(12)) - 768) < 100
    split = plans(SomeSteps(1, 5, 2.0, split=True))
    mean = sum(bridge_of(plan) for plan in split) / len(split)
    assert mean == pytest.approx(26 * 2 / 3 - 1, abs=1.0)  # the later of two different steps
    for plan in split:
        before = sum(k < bridge_of(plan) for k in kept_steps(plan))
        share = min(max(round(5 * bridge_of(plan) / 25), 1), bridge_of(plan), 4)
        assert bridge_of(plan) in kept_steps(plan) and len(kept_steps(plan)) == 5
        assert before == max(share, 5 - (25 - bridge_of(plan)))
    assert kept_steps(plans(SomeSteps(1, 25))[0]) == tuple(range(25))
