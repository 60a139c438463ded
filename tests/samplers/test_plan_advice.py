"""Advice of samplers: each message is raised, and the plan that does what it says is made."""

from dataclasses import replace

import pytest
import torch

from samplers import (
    CPS,
    DPM2M,
    Chain,
    Euler,
    FeynmanKac,
    Flash,
    FlowSDE,
    Gaussian,
    Latents,
    Looking,
    Ode,
    Particled,
    Plan,
    Sampling,
    Scheduler,
    TableSDE,
    Thinned,
    Thinning,
    WanSDE,
    Window,
    roll,
    steps_of,
)
from samplers.clock import Clocked, PartClock, on_clock
from samplers.completions import TextPlan
from samplers.forks import Forking
from samplers.planners import Tree
from samplers.scheduler import bound_to
from tests.support.advice import advice
from tests.support.levels import shifted_levels
from tests.support.tiny import gaussian_velocity

SIGMAS = shifted_levels(10)
EVEN = (1.0, 0.75, 0.5, 0.25, 0.0)
SDE = FlowSDE(0.7)
CHAIN = Chain(SDE, 4)
TWO = Chain(SDE, 2)
PARTS = PartClock(
    (2, 2),
    (
        *((level, 0.9) for level in (0.9, 0.6, 0.3, 0.0)),
        *((0.0, level) for level in (0.6, 0.3, 0.0)),
    ),
)


def by_parts(planner) -> Plan:
    return on_clock(planner(PARTS.sigmas, 0, 0)[0], PARTS)


def particles(sampling: Sampling):
    planner = Particled(Ode(6), SDE, 6, FeynmanKac((3,)), 2, 4)
    return roll(
        planner(SIGMAS, 2, 0), gaussian_velocity, Latents((1,)), (0,), seed=0, iteration=2,
        sampling=sampling,
    )  # fmt: skip


def moved(kernel) -> Gaussian:
    x = torch.ones(1, 3)
    return kernel(x, x, torch.tensor([0.75]), torch.tensor([0.5]))


def test_plans_of_parts_with_levels_of_their_own() -> None:
    advice(
        "its solver {} reads one level for all parts: set solver: euler",
        lambda: by_parts(Ode(solver=DPM2M())),
        lambda: by_parts(Ode(solver=Euler())),
    )
    advice(
        "it looks at samples in the middle, or moves them, and that needs one level for all parts: "
        "leave out what steers, scores or thins them there",
        lambda: by_parts(Looking(otherwise=CHAIN, at=(1,))),
        lambda: by_parts(CHAIN),
    )
    for kernel in (FlowSDE(0.7), CPS(0.5)):
        advice(
            "{} has numbers of one list of levels: use another kernel, such as flow_sde, "
            "constant_sde or cps",
            lambda: by_parts(Chain(WanSDE(), 2)),
            lambda kernel=kernel: by_parts(Chain(kernel, 2)),
        )
    advice(
        "parts of this model's states have levels of their own, so a plan has the model's levels "
        "alone: leave out what changes them (such as flash)",
        lambda: Clocked(SDE, PARTS).bound(EVEN),
        lambda: Clocked(SDE, PARTS).bound(PARTS.sigmas),
    )


def test_trees_of_texts() -> None:
    for follow in (
        lambda: TextPlan(6, (2, 4), (2,)),
        lambda: TextPlan(6, (2,), forking=Forking(1, 2)),
    ):
        advice(
            "a tree has either forks or cuts, not both: leave one of them out",
            lambda: TextPlan(6, (2, 4), (2,), forking=Forking(1, 2)),
            follow,
        )
    for follow in (lambda: TextPlan(6, (2, 4), (2,)), lambda: TextPlan(6, (2,), greedy=True)):
        advice(
            "a tree cannot have a greedy completion: leave out greedy, or the tree",
            lambda: TextPlan(6, (2, 4), (2,), greedy=True),
            follow,
        )


@pytest.mark.parametrize("kernel", [WanSDE(), TableSDE((0.5, 0.5, 0.5))], ids=["wan", "table"])
def test_kernels_are_bound_to_levels(kernel) -> None:
    advice(
        "{} is not bound to noise levels: call kernel.bound(sigmas) first",
        lambda: moved(kernel),
        lambda: moved(kernel.bound(EVEN)),
    )


def test_each_kernel_says_its_name() -> None:
    for kernel, name in ((WanSDE(), "WanSDE"), (TableSDE((0.5,)), "TableSDE")):
        with pytest.raises(ValueError, match=f"^{name} is not bound"):
            moved(kernel)


def test_a_noise_table_has_a_number_for_each_step_but_the_last() -> None:
    advice(
        "a noise table of {} numbers does not fit {} steps: give {}, one for each step but the "
        "last",
        lambda: TableSDE((0.5,) * 7).bound(EVEN),
        lambda: TableSDE((0.5,) * 3).bound(EVEN),
    )


def test_arguments_that_a_plan_had_name_their_route() -> None:
    advice(
        "samplers.Plan takes a route in place of {}: use {}",
        lambda: Plan(steps_of(EVEN, noisy={0}), SDE, thin=Thinning((2,), (2,), 4)),
        lambda: Thinned(TWO, Thinning((2,), (2,), 4))(EVEN, 0, 0),
    )


def test_splits_lie_at_different_steps_of_the_plan() -> None:
    tree = Tree(SDE, (3, 9), 2)
    for follow in (
        lambda: replace(tree, at=(3, 8))(SIGMAS, 0, 0),
        lambda: tree(shifted_levels(11), 0, 0),
    ):
        advice(
            "splits must be different steps between 0 and {} (the last step is deterministic), got "
            "{}: set `at`, or take more steps",
            lambda: tree(SIGMAS, 0, 0),
            follow,
        )


def test_a_plan_that_scores_in_the_middle_is_given_scores() -> None:
    advice(
        "{}: pass Sampling({}=...)",
        lambda: particles(Sampling()),
        lambda: particles(Sampling(score=lambda rollout: rollout.x0[:, 0])),
    )


def test_samples_are_stopped_before_steps_of_the_plan() -> None:
    advice(
        "samples cannot be stopped before the steps {}: choose steps from 1 to {}",
        lambda: Thinned(TWO, Thinning((9,), (2,), 4))(EVEN, 0, 0),
        lambda: Thinned(TWO, Thinning((3,), (2,), 4))(EVEN, 0, 0),
    )


def test_a_schedulers_steps_have_their_own_solver_and_levels() -> None:
    kernel = Scheduler(((0.5, 0.1, 0.1),) * 4, EVEN)

    steps = steps_of(EVEN, noisy={0, 1, 2})
    advice(
        "kernel: scheduler already takes all steps: leave out the solver {}, or what brings it "
        "(such as flash)",
        lambda: bound_to(Plan(steps, Scheduler(), solver=DPM2M()), kernel),
        lambda: bound_to(Plan(steps, Scheduler()), kernel),
    )
    window = Window(Scheduler(), 2, 2)  # whose flash brings levels and a solver
    advice(
        "kernel: scheduler works only at its pipeline's own levels, but this plan has other ones: "
        "leave out what changes them (such as flash)",
        lambda: bound_to(replace(window, flash=Flash())(EVEN, 0, 0)[0], kernel),
        lambda: bound_to(window(EVEN, 0, 0)[0], kernel),
    )


def test_a_plan_has_a_step() -> None:
    advice(
        "a plan needs at least one step: give two or more noise levels",
        lambda: Plan(steps_of((0.5,))),
        lambda: Plan(steps_of((0.5, 0.0))),
    )
