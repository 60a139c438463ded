import gc
import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samplers import (
    DPM2M,
    SA,
    Chain,
    ConstantSDE,
    Decaying,
    Euler,
    ExponentiallyDecaying,
    Flash,
    FlowSDE,
    Fork,
    Frozen,
    Heun,
    Latents,
    Ode,
    Plan,
    Progressive,
    Prune,
    Random,
    Stripes,
    Tree,
    WanSDE,
    Window,
    evaluations,
    roll,
    steps_of,
)
from tests.support.levels import shifted_levels
from tests.support.tiny import Counting

SIGMAS, SDE = shifted_levels(10, shift=3.0), FlowSDE(0.7)


def marks(plan, name="noisy"):
    return [k for k, s in enumerate(plan.steps) if getattr(s, name)]


def branches(plan):
    return {k: s.branch for k, s in enumerate(plan.steps) if s.branch > 1}


COUNTED = [
    Ode(3), Ode(3, Heun()), Ode(3, DPM2M()), Ode(3, SA()), Chain(SDE, 4),
    Chain(SDE, 4, shared_noise=True), Window(SDE, 4, 3, Frozen(4)),
    Window(SDE, 4, 3, Frozen(4), shared_noise=True, flash=Flash()), Fork(SDE, 3, roots=2),
    Fork(SDE, 3, at=(2, 7)), Tree(SDE, (0, 3), (2, 3)),
    Tree(SDE, (3,), roots=3, shared_noise=True, stripes=Stripes(2, 5)),
]  # fmt: skip


@pytest.mark.parametrize("planner", COUNTED, ids=str)
def test_evaluations_are_what_a_counting_velocity_counts(planner):
    plans = planner(SIGMAS, 0, 0)
    counting = Counting()
    roll(plans, counting, Latents((2,)), [0, 1], seed=0, iteration=0)
    assert counting.states == 2 * evaluations(plans)
    for plan in plans:
        counting.states = 0
        roll((plan,), counting, Latents((2,)), [0], seed=0, iteration=0)
        assert counting.states == plan.evaluations


@settings(max_examples=40)
@given(st.data())
def test_evaluations_of_any_plans_together(data):
    """Random marks, roots, solvers and shared noise; two plans that may share a trunk."""
    steps = 5
    sigmas = shifted_levels(steps)

    def plan():
        noisy = data.draw(st.sets(st.integers(0, steps - 2)))
        branch = {k: data.draw(st.integers(1, 2)) for k in noisy}
        return Plan(
            steps_of(sigmas, noisy=noisy, branch=branch),
            SDE,
            roots=data.draw(st.integers(1, 2)),
            shared_noise=data.draw(st.booleans()),
            solver=data.draw(st.sampled_from([Euler(), Heun(), DPM2M(), SA()])),
            solve_from=data.draw(st.integers(0, steps)),
        )

    plans, counting = (plan(), plan()), Counting()
    roll(plans, counting, Latents((1,)), [0], seed=0, iteration=0)
    assert counting.states == evaluations(plans)


OTHERS = [
    {"shared_noise": True}, {"solver": DPM2M()}, {"solve_from": 2}, {"roots": 1},
    {"steps": steps_of(shifted_levels(5, 2.0), noisy={3})},
    {"steps": steps_of(shifted_levels(5), noisy={1})},
]  # fmt: skip


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_plans_share_no_more_than_they_have_in_common(change):
    """A plan's samples are the same after a near relative as after a stranger."""
    plan = Plan(steps_of(shifted_levels(5), noisy={3}), SDE, roots=2, solver=Heun())
    other, stranger = replace(plan, **change), Plan(steps_of(SIGMAS), roots=3)
    second = lambda *plans: roll(plans, Counting(), Latents((1,)), [0], seed=0, iteration=0)[1].x0
    assert torch.equal(second(plan, other), second(stranger, other))


def test_published_evaluations():
    """TempFlow: one trunk. MixGRPO-Flash: 11, 16 and 7 of 25 steps; our 24 ends at 0, not short."""
    ten = shifted_levels(10)
    fork = Fork(SDE, branch=6, roots=4)(ten, 0, 0)
    assert evaluations(fork) == 4 * 9 + 24 * sum(range(1, 10))
    assert sum(p.evaluations for p in fork) == 4 * sum(range(1, 10)) + 24 * sum(range(1, 10))
    mix = shifted_levels(25, 3.0)
    for start, ratio, steps in (
        (0, 0.4, 11),
        (2, 0.4, 13),
        (8, 0.4, 16),
        (19, 0.4, 24),
        (0, 0.2, 7),
    ):
        (plan,) = Window(SDE, 1, 4, Frozen(start), flash=Flash(ratio))(mix, 0, 0)
        assert plan.evaluations == steps and plan.steps[-1].sigma_next == 0


def test_flash_levels_are_the_published_ones():
    """linspace(t[last + 1], 0, n) shifted, without being told the shift."""
    for shift in (1.0, 3.0, 7.0):
        sigmas = shifted_levels(25, shift)
        (plan,) = Window(SDE, 2, 4, Frozen(8), flash=Flash(0.4))(sigmas, 0, 0)
        points = int((25 - 11) * 0.4)
        t = [(1 - 12 / 25) * (1 - i / (points - 1)) for i in range(points)]
        want = [shift * a / (1 + (shift - 1) * a) for a in t]
        assert plan.sigmas[:12] == sigmas[:12]
        assert plan.sigmas[12:] == pytest.approx(want)
        assert (plan.solver, plan.solve_from) == (DPM2M(), 12)
        assert marks(plan) == marks(plan, "train") == [8, 9, 10, 11]


@given(st.integers(3, 30), st.integers(0, 27), st.floats(0.01, 1.0), st.lists(st.floats(0.05, 1.0)))
def test_flash_levels_fall_to_zero_on_any_list(steps, end, ratio, falls):
    sigmas, level = [1.0], 1.0
    for k in range(steps - 1):
        level *= 0.5 + 0.45 * (falls[k % len(falls)] if falls else 0.8)
        sigmas.append(level)
    sigmas.append(0.0)
    got = Flash(ratio).sigmas(sigmas, min(end, steps - 1))
    assert all(a > b for a, b in pairwise(got)) and got[-1] == 0
    assert len(got) <= len(sigmas)


def test_a_chain_trains_on_a_fraction_of_all_but_the_last_step():
    (plan,) = Chain(SDE, 4)(SIGMAS, 0, 0)
    assert marks(plan) == marks(plan, "train") == list(range(9))
    assert plan.nodes == (4,) * 10
    (plan,) = Chain(SDE, 4, fraction=0.6, noisy_last=True)(shifted_levels(16), 0, 0)
    assert len(marks(plan, "train")) == 9 and marks(plan) == list(range(16))
    half = Chain(SDE, 4, 0.5)
    chosen = {tuple(marks(half(SIGMAS, i, s)[0], "train")) for i in range(9) for s in (0, 1)}
    assert len(chosen) > 10
    assert half(SIGMAS, 3, 1) == half(SIGMAS, 3, 1)


def test_a_chain_of_two_steps_has_a_step_to_train():
    (plan,) = Chain(SDE, 4)((1.0, 0.5, 0.0), 0, 0)
    assert marks(plan, "train") == [0]


POSITIONS = [
    Progressive(7), Progressive(7, None), Progressive(7, 3, True), Decaying(9), Decaying(9, 1),
    Decaying(9, roll_back=True), ExponentiallyDecaying(5), ExponentiallyDecaying(5, roll_back=True),
    Random(), Random(2, 9), Frozen(), Frozen(5),
]  # fmt: skip


@pytest.mark.parametrize("position", POSITIONS, ids=str)
def test_a_window_is_never_empty_and_is_a_function_of_iteration_and_seed(position):
    sigmas = shifted_levels(20)
    planner = Window(SDE, 2, 4, position)
    for iteration in range(0, 500, 13):
        (plan,) = planner(sigmas, iteration, 1)
        window = marks(plan)
        assert window and window == marks(plan, "train") and len(window) <= 4
        assert window == list(range(window[0], window[0] + len(window))) and window[-1] < 18
        assert planner(sigmas, iteration, 1) == (plan,)


def test_windows_move_as_told():
    starts = lambda position, iterations: [position(i, 0, 10, 4) for i in iterations]
    assert starts(Progressive(2), range(6)) == [0, 0, 1, 1, 2, 2]
    assert starts(Progressive(1, None), range(6)) == [0, 4, 8, 8, 8, 8]
    assert starts(Progressive(1, None, True), range(6)) == [0, 4, 8, 0, 4, 8]
    assert starts(Decaying(4, 1, 5), range(9)) == [0, 0, 0, 0, 5, 5, 5, 5, 5]
    assert starts(Decaying(4, 1, 5, True), range(8)) == [0, 0, 0, 0, 5, 5, 0, 0]
    assert starts(ExponentiallyDecaying(3, 1.0, 0, 5, True), range(6)) == [0, 0, 0, 5, 0, 0]
    seen = {(i, s): Random(3, 9)(i, s, 10, 4) for i in range(50) for s in (0, 1)}
    assert set(seen.values()) == {3, 4, 5}
    assert any(seen[i, 0] != seen[i, 1] for i in range(50))


def test_a_fork_branches_once_at_every_step_but_the_last():
    plans = Fork(SDE, 6, roots=4)(SIGMAS, 0, 0)
    for k, plan in enumerate(plans):
        assert marks(plan) == marks(plan, "train") == [k] and branches(plan) == {k: 6}
        assert plan.group == 24
    assert len(plans) == 9
    assert [marks(p) for p in Fork(SDE, 2, at=(4, 1))(SIGMAS, 0, 0)] == [[4], [1]]


def test_a_tree_branches_where_told():
    (plan,) = Tree(SDE, (1, 4), (2, 3), roots=2)(SIGMAS, 0, 0)
    assert plan.nodes == (2, 4, 4, 4, 12, 12, 12, 12, 12, 12)
    assert marks(plan) == marks(plan, "train") == list(range(9))
    (mixed,) = Tree(SDE, (0, 6), stripes=Stripes(size=2, every=4))(SIGMAS, 0, 0)
    assert marks(mixed) == [0, 1, 4, 5, 6, 8] and branches(mixed) == {0: 2, 6: 2}


def test_branch_grpos_tree_has_its_218_edges_and_138_after_pruning():
    """Published counts include the noisy last step, 16 edges that ours does not train on."""
    sigmas = shifted_levels(20, 3.0)
    edges = lambda plan: sum(n for n, s in zip(plan.nodes, plan.steps, strict=True) if s.train)
    (plan,) = Tree(ConstantSDE(), (0, 3, 6, 9))(sigmas, 0, 0)
    assert plan.group == 16 and edges(plan) == 218 - 16
    (pruned,) = Tree(ConstantSDE(), (0, 3, 6, 9), prune=Prune((14, 15, 16, 17, 18)))(sigmas, 0, 0)
    assert edges(pruned) == 138 - 16


def test_pruned_depths_slide_and_stop():
    code = Prune((14, 15, 16, 17, 18), every=30, move=-1, stop=8)
    at = lambda prune, iteration: sorted(prune.at(iteration, 19))
    assert at(code, 0) == [14, 15, 16, 17, 18]
    assert at(code, 70) == [12, 13, 14, 15, 16]
    assert at(code, 290) == at(code, 180) == [8, 9, 10, 11, 12] and at(code, 179)[0] == 9
    paper = Prune((9, 10, 11, 12), every=10, until=50)
    assert at(paper, 25) == [11, 12, 13, 14] and at(paper, 49) == [13, 14, 15, 16]
    assert at(paper, 50) == []
    assert at(Prune((9, 10), every=1), 500) == [17, 18]


def test_the_kernel_is_bound_to_the_levels():
    (plan,) = Chain(WanSDE(), 2)((0.9997, 0.9, 0.4, 0.0), 0, 0)
    assert plan.kernel == WanSDE(0.9)
    assert plan.columns.std[0] == pytest.approx(0.9 * 0.9997 * (0.9997 - 0.9) ** 0.5)
    assert plan.columns.h == pytest.approx((0.0997, 0.5, 0.4))
    assert plan.columns.noisy == (True, True, False) and plan.columns.group == 2


def test_a_plan_may_start_below_one_and_is_a_value():
    plan = Chain(SDE, 2)((0.936, 0.5, 0.0), 0, 0)[0]
    assert plan.sigmas == (0.936, 0.5, 0.0)
    assert hash(plan) == hash(Chain(SDE, 2)((0.936, 0.5, 0.0), 0, 0)[0])


@pytest.mark.parametrize("planner", [Chain(FlowSDE(), 2), Fork(FlowSDE(), 2)])
def test_a_level_that_is_as_good_as_clean_is_the_end(planner):
    """Schedulers without a shift give such a level; noise in the step to it would be seen."""

    def noisy(level):
        plans = planner([1.0, 0.75, 0.5, 0.25, level, 0.0], 0, 0)
        assert all(len(plan.steps) == 5 for plan in plans)
        return {k for plan in plans for k, step in enumerate(plan.steps) if step.noisy}

    assert noisy(0.001) == {0, 1, 2}
    assert noisy(0.01) == {0, 1, 2, 3}  # shifted schedules keep theirs


def test_a_chain_keeps_the_plan_of_the_last_iteration_and_no_older_one():
    chain = Chain(SDE, 4, fraction=0.3)
    older = [weakref.ref(chain(shifted_levels(8), iteration, 0)[0]) for iteration in range(9)]
    gc.collect()
    assert [plan() is not None for plan in older[:-1]] == [False] * 8
    last = chain(shifted_levels(8), 8, 0)[0]
    assert last is older[-1]()
