"""Routes: one may stand around another, and each says what it costs and what it refuses."""

from dataclasses import replace

import pytest
import torch

from samplers import (
    Chain,
    ConstantSDE,
    FeynmanKac,
    FlowSDE,
    Guided,
    Latents,
    Looking,
    Looks,
    Ode,
    Particled,
    PlainRoute,
    Plan,
    RewardDrift,
    RewardGuide,
    Sampling,
    Thinned,
    Thinning,
    roll,
    steps_of,
)
from samplers.routes.guiding import GuidedEdges
from samplers.routes.keeping import KeepingRoute, kept_states
from samplers.routes.looks import LookedRoute, Seen
from samplers.routes.tails import LastSteps
from tests.support.tiny import Counting

LEVELS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
CHAIN = Chain(FlowSDE(0.7), 4)
PROBES = RewardGuide(RewardDrift(0.1), first=1)
THIN = Thinning((2,), (4,), 6)
PARTICLES = Particled(Ode(4), ConstantSDE(0.7), 4, FeynmanKac((1, 3)), 0, 1)


@pytest.mark.parametrize(
    "planner",
    [
        CHAIN,
        Looking(CHAIN, 2),
        Guided(CHAIN, PROBES),
        Guided(CHAIN, replace(PROBES, by="slope")),
        Looking(Guided(CHAIN, PROBES)),
        Guided(Looking(CHAIN), PROBES),
        Thinned(CHAIN, THIN),
        PARTICLES,
        Guided(PARTICLES, PROBES),
        Looking(LastSteps(4, 2), at=(1, 3)),
    ],
    ids=lambda planner: type(planner).__name__,
)
def test_a_route_says_what_it_costs(planner) -> None:
    """Network evaluations, scored samples and noted samples are those that sampling counts."""
    (plan,), velocity, scored = planner(LEVELS, 0, 0), Counting(), [0]

    def score(rollout):
        scored[0] += len(rollout.x0)
        return rollout.x0[:, 0]

    def slope(rollout):
        scored[0] += len(rollout.x0)
        return torch.ones_like(rollout.x0)

    asked = {"score": score, "slope": slope}
    sampling = Sampling(**{name: asked[name] for name in asked if name in plan.route.asks})
    how = {"seed": 0, "iteration": 0, "sampling": sampling}
    (rollout,) = roll((plan,), velocity, Latents((2,)), (3, 5), **how)
    seen = sum(len(note.x0) for note in rollout.notes if isinstance(note, Seen))
    assert velocity.states == 2 * plan.evaluations
    assert sum(map(plan.step_evaluations, range(5))) == plan.evaluations
    assert (scored[0] + seen, seen) == (2 * plan.predicted, 2 * plan.stored)
    assert ("seen" in plan.route.asks) == bool(seen)
    moved = any(isinstance(edges, GuidedEdges) for edges in rollout.edges)
    assert moved == ("moved" in plan.route.asks and bool(rollout.edges))
    plain = type(plan.route) is PlainRoute
    assert plan.route.splits == plain and (plain or not rollout.plan.route.splits)


def test_routes_that_only_look_leave_samples_as_they_are() -> None:
    how = {"seed": 0, "iteration": 0}

    def sampled(plan: Plan):
        return roll((plan,), Counting(), Latents((2,)), (3, 5), **how)[0]

    (plan,) = CHAIN(LEVELS, 0, 0)
    plain = sampled(plan)
    route = KeepingRoute((1, 4), inner=LookedRoute(Looks((2,)), inner=plan.route))
    looked = sampled(replace(plan, route=route))
    assert torch.equal(looked.x0, plain.x0) and plain.notes == ()
    for mine, other in zip(looked.edges, plain.edges, strict=True):
        assert torch.equal(mine.x_next, other.x_next) and torch.equal(mine.logp, other.logp)
    states = kept_states(looked)
    assert [*states] == [1, 4]
    assert all(torch.equal(states[k], plain.edges[k].x) for k in (1,)), "states before the steps"
    assert torch.equal(states[4], plain.edges[3].x_next)


@pytest.mark.parametrize(
    ("name", "value", "now"),
    [
        ("looks", Looks((1,)), r"samplers.Looking\(planner"),
        ("thin", THIN, r"samplers.Thinned\(planner"),
        ("steer", FeynmanKac((1,)), "samplers.Particled"),
        ("guide", PROBES, r"samplers.Guided\(planner"),
        ("keep", (1,), "a planner of samplers.routes.tails"),
        ("bridge", 2, "a planner of samplers.routes.tails"),
    ],
)
def test_an_argument_that_moved_is_answered_with_what_to_write(name, value, now) -> None:
    plan = Plan(steps_of(LEVELS), roots=4)
    for refused in (
        lambda: Plan(steps_of(LEVELS), **{name: value}),
        lambda: replace(plan, **{name: value}),
    ):
        with pytest.raises(TypeError, match=f"a route in place of {name}: use {now}"):
            refused()
