"""Clean samples on the way: what a state stands for, what it costs, and groups that shrink."""

from itertools import combinations, pairwise

import pytest
import torch

from samplers import (
    CPS,
    Chain,
    ConstantSDE,
    FlowSDE,
    Frozen,
    Latents,
    Looking,
    Sampling,
    TableSDE,
    Thinned,
    Thinning,
    Tree,
    Window,
    evaluations,
    mean_log_prob,
    roll,
)
from samplers.picture import describe_plan
from samplers.routes.thinning import extremes
from samplers.table_sde import as_table
from tests.support.tiny import Counting, gaussian_velocity

LEVELS = (*(3 * t / (1 + 2 * t) for t in [1 - k / 6 for k in range(6)]), 0.0)
DRAWS = (3, 7)


def rolled(planner, draws=DRAWS, velocity=gaussian_velocity, score=None, levels=LEVELS):
    latents = Latents((2,), dtype=torch.float64)
    (rollout,) = roll(
        planner(levels, 0, 0), velocity, latents, draws, seed=0, iteration=0,
        sampling=Sampling(score=score),
    )  # fmt: skip
    return rollout


def finished(x, levels):
    """Euler's steps by hand."""
    for sigma, sigma_next in pairwise(levels):
        at = torch.full((len(x),), sigma, dtype=torch.float64)
        x = x - (sigma - sigma_next) * gaussian_velocity(x, at, torch.zeros(0))
    return x


@pytest.mark.parametrize("steps", [None, 2, 1])
def test_a_state_is_finished_by_the_ode(steps):
    rollout = rolled(Looking(Chain(FlowSDE(0.7), 3), steps))
    assert [seen.step for seen in rollout.notes] == [0, 1, 2, 3, 4]
    for seen, edges in zip(rollout.notes, rollout.edges, strict=True):
        k = seen.step
        levels = {
            None: LEVELS[k:],
            1: (LEVELS[k], LEVELS[6]),
            2: (LEVELS[k], LEVELS[k + round((6 - k) / 2)], LEVELS[6]),
        }[steps]
        torch.testing.assert_close(seen.x0, finished(edges.x, levels), atol=1e-6, rtol=1e-6)
        assert seen.prompt.tolist() == [0, 0, 0, 1, 1, 1]
    plain = rolled(Chain(FlowSDE(0.7), 3))
    assert torch.equal(rollout.x0, plain.x0) and plain.notes == ()


def test_behind_the_last_noise_a_state_is_the_sample():
    rollout = rolled(Looking(Window(FlowSDE(0.7), 3, 2, Frozen(1)), at=(1, 3, 5)))
    ahead, behind, last = (seen.x0 for seen in rollout.notes)
    assert torch.equal(behind, rollout.x0) and torch.equal(last, rollout.x0)
    assert not torch.isclose(ahead, rollout.x0).any()


@pytest.mark.parametrize(
    ("planner", "looked", "wanted"),
    [
        (Looking(Chain(FlowSDE(), 3)), 15, 3 * (6 + 5 + 4 + 3 + 2 + 1)),
        (Looking(Chain(FlowSDE(), 3), 1), 15, 3 * 6),
        (Looking(Chain(FlowSDE(), 3), 2, first=False), 12, 3 * (6 + 4)),
        (Looking(Chain(FlowSDE(), 3, shared_noise=True)), 13, 6 + 3 * (5 + 4 + 3 + 2 + 1)),
        (Looking(Window(FlowSDE(), 3, 2, Frozen(1))), 6, 3 * (6 + 4 + 3)),
        (Looking(Tree(ConstantSDE(), (0, 2), 2), 2), 1 + 2 + 2 + 4 + 4, 17 + 13),
        (Thinned(Chain(FlowSDE(), 2), Thinning((2, 4), (4, 2), 6)), 10, 6 * 3 + 4 * 2 + 2),
    ],
)
def test_the_plan_knows_what_looking_costs(planner, looked, wanted):
    (plan,), count, velocity = planner(LEVELS, 0, 0), [0], Counting()

    def score(rollout):
        count[0] += len(rollout.x0)
        return rollout.x0[:, 0]

    rollout = rolled(planner, velocity=velocity, score=score)
    seen = count[0] + sum(len(seen.x0) for seen in rollout.notes)
    assert (plan.predicted, evaluations((plan,))) == (looked, wanted)
    assert (seen, velocity.states) == (2 * looked, 2 * wanted)
    assert f"{wanted} network evaluations" in describe_plan((plan,))
    assert f"{looked} intermediate" in describe_plan((plan,))


def test_what_is_looked_at_belongs_to_its_draw():
    planner = Looking(Chain(FlowSDE(), 2), 2)
    both, one = rolled(planner), rolled(planner, draws=(7,))
    for a, b in zip(both.notes, one.notes, strict=True):
        assert torch.equal(a.x0[2:], b.x0)


@pytest.mark.parametrize("keep", [1, 2, 3, 5, 6])
def test_the_most_different_rewards_stay(keep):
    score = torch.randn(20, 6, generator=torch.Generator().manual_seed(keep)).double()
    for row, kept in zip(score, extremes(score, keep), strict=True):
        best = max(float(row[list(c)].var(correction=0)) for c in combinations(range(6), keep))
        assert float(row[kept].var(correction=0)) == pytest.approx(best)
        assert kept.tolist() == sorted(set(kept.tolist()))


def test_samples_without_a_score_go_first():
    nan = torch.nan
    score = torch.tensor([[0.0, nan, 3.0, 1.0, nan], [nan, nan, nan, 1.0, nan]])
    assert extremes(score, 2).tolist() == [[0, 2], [0, 3]]
    assert extremes(score, 3).tolist() == [[0, 2, 3], [0, 1, 3]]


def test_a_group_shrinks_on_the_way():
    """Of 6 samples 4, then 2 go on: their whole trajectories are kept, and no other."""
    shown: list[torch.Tensor] = []

    def score(rollout):
        shown.append(rollout.x0)
        return rollout.x0[:, 0]

    planner = Thinned(Chain(FlowSDE(0.7), 2), Thinning((2, 4), (4, 2), 6))
    rollout = rolled(planner, score=score)
    assert [len(x0) for x0 in shown] == [12, 8] and rollout.x0.shape == (4, 2)
    assert [edges.step for edges in rollout.edges] == [0, 1, 2, 3, 4]
    for edges, after in pairwise(rollout.edges):
        assert torch.equal(edges.x_next, after.x) and edges.prompt.tolist() == [0, 0, 1, 1]
    for edges in rollout.edges:
        at, to = (torch.full((4,), LEVELS[edges.step + i], dtype=torch.float64) for i in (0, 1))
        v = gaussian_velocity(edges.x, at, edges.prompt)
        step = rollout.plan.kernel(edges.x, v, at, to)
        torch.testing.assert_close(mean_log_prob(step, edges.x_next), edges.logp)
    last = rollout.edges[-1].x  # before step 4: the two of most different projections
    ends = finished(last, (LEVELS[4], 0.0))[:, 0].view(2, 2)
    whole = shown[1][:, 0].view(2, 4)
    for pair, four in zip(ends, whole, strict=True):
        assert sorted(pair.tolist()) == pytest.approx([float(four.min()), float(four.max())])
    wide = rolled(Chain(FlowSDE(0.7), 6))  # the first steps are those of a plain group of six
    at = wide.edges[0].x.view(2, 6, 2)
    assert all(
        (at[d] == x).all(1).any() for d in (0, 1) for x in rollout.edges[0].x.view(2, 2, 2)[d]
    )
    alone = rolled(planner, draws=(7,), score=lambda rollout: rollout.x0[:, 0])
    assert torch.equal(alone.x0, rollout.x0[2:])


def test_a_table_of_noise():
    kernel = as_table(FlowSDE(0.7), LEVELS)
    assert len(kernel.table) == 5
    table, flow = (rolled(Chain(k, 3)) for k in (kernel, FlowSDE(0.7)))
    torch.testing.assert_close(table.x0, flow.x0, atol=1e-6, rtol=1e-6)
    own = TableSDE((0.1, 0.2, 0.3, 0.4, 0.5)).bound(LEVELS)
    for k in range(5):
        at, to = (torch.tensor([LEVELS[k + i]]) for i in (0, 1))
        std = own(torch.zeros(1, 1), torch.zeros(1, 1), at, to).std
        assert float(std) == pytest.approx((k + 1) / 10 * (LEVELS[k] - LEVELS[k + 1]) ** 0.5)
    cps = as_table(CPS(0.5), LEVELS).table
    assert all(g > 0 for g in cps)
