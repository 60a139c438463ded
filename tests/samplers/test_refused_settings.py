"""Settings and calls that samplers refuse: one table of the room, with a row for each sentence."""

from dataclasses import dataclass, replace

import torch

from samplers import (
    CPS,
    DPM2M,
    SA,
    Chain,
    ConstantSDE,
    Euler,
    FeynmanKac,
    Flash,
    FlowSDE,
    Fork,
    Frozen,
    Gaussian,
    Guided,
    Heun,
    Latents,
    Looking,
    Looks,
    Ode,
    Particled,
    Plan,
    Progressive,
    Prune,
    Random,
    RewardDrift,
    RewardGuide,
    Scattered,
    Scheduler,
    Step,
    TableSDE,
    Thinned,
    Thinning,
    Tree,
    WanSDE,
    Window,
    roll,
    steps_of,
)
from samplers.affine import affine_steps
from samplers.clock import Clocked, PartClock, on_clock
from samplers.completions import TextPlan
from samplers.forks import Forking
from samplers.mixed import MixedRollout
from samplers.plan import Columns
from samplers.routes.guiding import GuidedRoute
from samplers.routes.keeping import KeepingRoute
from samplers.routes.looks import LookedRoute
from samplers.routes.steering import SteeredRoute, best, steer_plan
from samplers.routes.tails import LastSteps, OneOfSteps, SomeSteps, TwoLeaps
from samplers.routes.thinning import ThinnedRoute, extremes
from samplers.scheduler import KernelSteps, bound_to
from tests.support.levels import shifted_levels
from tests.support.refusals import refusal_in, refusals_in
from tests.support.tiny import gaussian_velocity


@dataclass(frozen=True)
class Clipped:
    """A kernel whose mean is no sum of the state and the velocity."""

    def __call__(self, x, v, sigma, sigma_next) -> Gaussian:
        return Gaussian((x - v).clamp(-1, 1), torch.full_like(sigma, 0.1))

    def bound(self, sigmas) -> "Clipped":
        return self


@dataclass(frozen=True)
class Bent(Euler):
    """A solver whose step is a square."""

    def __call__(self, at, past):
        return at.x**2, None


@dataclass(frozen=True)
class Leapfrog(Euler):
    """A solver whose step begins at the state before."""

    memory = 1

    def __call__(self, at, past):
        return (past[0].x if past else at.x) - at.v, None


SIGMAS = shifted_levels(10)
EVEN = (1.0, 0.75, 0.5, 0.25, 0.0)
SDE = FlowSDE(0.7)
CHAIN = Chain(SDE, 4)
ONES = ((True,) * 2, (1.0,) * 2, (1.0,) * 2)
TWO = Chain(SDE, 2)
OWN_STEPS = Scheduler(((0.5, 0.1, 0.1),) * 4, EVEN)
PROBES = RewardGuide(RewardDrift(0.1), first=1)
THIN = Thinning((2,), (4,), 6)
LOOKED = LookedRoute(Looks((1,)))
STEERED = SteeredRoute(FeynmanKac((1,)))


TURNS = PartClock(
    (2, 2),
    (
        *((level, 0.9) for level in (0.9, 0.6, 0.3, 0.0)),
        *((0.0, level) for level in (0.6, 0.3, 0.0)),
    ),
)


def of_turns(planner):
    return on_clock(planned(planner, TURNS.sigmas), TURNS)


def planned(planner, sigmas=SIGMAS, iteration=0):
    return planner(sigmas, iteration, 0)[0]


def along(route):
    """A plan of five steps, four of them noisy, along a route."""
    return Plan(steps_of(shifted_levels(5), noisy={0, 1, 2, 3}), SDE, 4, route=route)


def rolled(planner, draws=(0,), **settings):
    return roll(
        planner(SIGMAS, 2, 0), gaussian_velocity, Latents((1,)), draws, seed=0, iteration=2,
        **settings,
    )  # fmt: skip


def steered(at, planner):
    return steer_plan(
        FeynmanKac(at), planned(planner), gaussian_velocity, lambda x0, prompt: x0[:, 0],
        Latents((1,)), [0], seed=0,
    )  # fmt: skip


def two_of_one(kernel):
    """A batch of two sizes whose plans have other noisy steps."""
    plans = [Plan(steps_of(EVEN, noisy=noisy), kernel, 2) for noisy in ({0}, {1})]
    parts = [roll((plan,), gaussian_velocity, Latents((1,)), [0], seed=0, iteration=0)[0]
             for plan in plans]  # fmt: skip
    return MixedRollout(tuple(parts), ((0,), (1,)), (0, 1))


REFUSED = [
    # plans
    (lambda: Plan(()), "at least one step"),
    (lambda: Plan(steps_of((1.0, 0.5))), "down to 0, but run from 1.0 to 0.5"),
    (lambda: Plan(steps_of((1.2, 0.0))), "from at most 1 down to 0"),
    (lambda: Plan(steps_of((0.5, 0.7, 0.0))), "step 0: sigma must decrease"),
    (lambda: Plan(steps_of((1.0, 0.5, 0.5, 0.0))), "step 1: sigma must decrease"),
    (lambda: Plan(steps_of((1.0, 0.4, 0.6, 0.0))), "step 1: sigma must decrease"),
    (lambda: Plan((Step(1.0, 0.5), Step(0.4, 0.0))), "level 0.5, but the next starts at 0.4"),
    (lambda: Plan(steps_of(SIGMAS), roots=0), "needs at least one sample"),
    (lambda: Plan(steps_of(SIGMAS), split=0.0), "split must be above 0"),
    (lambda: Plan(steps_of(SIGMAS), solve_from=11), "solve_from is 11"),
    (lambda: Plan(steps_of(SIGMAS, train={1})), "step 1: only a noisy step"),
    (lambda: Plan(steps_of(SIGMAS, branch={1: 2})), "step 1: only a noisy step"),
    (lambda: Plan(steps_of(SIGMAS, noisy={1}, branch={1: 0}), SDE), "branch must be at least 1"),
    (lambda: Plan(steps_of(SIGMAS, noisy={1})), "no kernel"),
    (lambda: Plan(steps_of(SIGMAS, noisy={9}, train={9}), CPS()), "step 9: CPS.* adds no noise"),
    (lambda: Plan(steps_of(SIGMAS, noisy={1}, train={1}), FlowSDE(0.0)), "adds no noise"),
    (lambda: steps_of(SIGMAS, noisy={10}), r"noisy steps \[10\] are out of range"),
    (lambda: steps_of(SIGMAS, branch={-1: 2}), r"branch steps \[-1\] are out of range"),
    # planners
    (lambda: planned(CHAIN, (1.0, 0.0)), "at least two steps"),
    (lambda: planned(Chain(SDE, 4, fraction=0.0)), r"must be in \(0, 1\]"),
    (lambda: planned(Window(SDE, 4, 9)), "9 steps does not fit into the first 8 of 10"),
    (lambda: planned(Window(SDE, 4, 4, Frozen(8))), "cannot start at step 8"),
    (lambda: planned(Window(SDE, 4, 4, Random(0, 9))), "between 0 and 9"),
    (lambda: planned(Window(SDE, 4, 4, Random(6))), "no window of 4 steps fits"),
    (lambda: planned(Window(SDE, 4, 4, Progressive(0))), "every must be at least 1"),
    (lambda: planned(Window(SDE, 4), iteration=-1), "counted from 0"),
    (lambda: planned(Window(SDE, 4, flash=Flash(0.0))), r"must be in \(0, 1\]"),
    (lambda: planned(Fork(SDE, 2, at=(10,))), "out of range"),
    (lambda: planned(Fork(SDE, 2, at=())), "one step to fork at"),
    (lambda: planned(Tree(SDE, (9,))), "between 0 and 8"),
    (lambda: planned(Tree(SDE, (1, 1))), "different steps"),
    (lambda: planned(Tree(SDE, (1, 2), (2,))), "one branch factor each"),
    (lambda: planned(Tree(SDE, (1,), prune=Prune((9,)))), r"pruned steps \(9,\)"),
    (lambda: planned(Tree(SDE, (1,), prune=Prune(()))), "pruning leaves no step"),
    (lambda: planned(Tree(SDE, (1,), prune=Prune(tuple(range(9))))), "nothing is left"),
    (lambda: planned(Scattered(SDE, 4, 4, 0.2)), "4 noisy steps do not fit into the first 2"),
    (lambda: planned(Scattered(SDE, 4, 4, 0.0)), r"the share of noisy steps must be in \(0, 1\]"),
    (lambda: planned(LastSteps(2, 0)), "last must be between 1 and 10"),
    (lambda: planned(OneOfSteps(2, 0.5, 0.5)), "select no step"),
    (lambda: planned(SomeSteps(2, 11)), "active must be between 1 and 10"),
    (lambda: planned(TwoLeaps(2), shifted_levels(1)), "two leaps need at least 2 steps"),
    (lambda: planned(TwoLeaps(2, order=0)), "an order of at least 1 and a reach of at least 1"),
    (lambda: planned(TwoLeaps(2, reach=0)), "a reach of at least 1, not 10 steps, "),
    # kernels and solvers
    (lambda: WanSDE()(*torch.ones(4, 1)), r"bound\(sigmas\)"),
    (lambda: WanSDE().bound((1.0,)), "two noise levels"),
    (lambda: TableSDE((0.1, 0.0)), "above 0"),
    (lambda: affine_steps(planned(Chain(Clipped(), 4))), "the kernel Clipped is not a x"),
    (lambda: affine_steps(planned(Ode(4, Heun()))), "Heun needs more than the velocity"),
    (lambda: affine_steps(planned(Ode(4, Leapfrog()))), "Leapfrog remembers more"),
    (lambda: affine_steps(planned(Ode(4, Bent()))), "Bent is not linear"),
    (lambda: TableSDE((0.1,) * 4).bound(SIGMAS), "4 numbers does not fit 10 steps: give 9"),
    (lambda: TableSDE((0.1,))(*torch.ones(4, 1)), r"call kernel.bound\(sigmas\) first"),
    (lambda: SA(low=0.9, high=0.3), r"low 0\.9 must be at most high 0\.3"),
    (lambda: bound_to(planned(Chain(Scheduler(), 2)), OWN_STEPS), "at its pipeline's own levels"),
    (
        lambda: bound_to(
            replace(planned(Chain(Scheduler(), 2), EVEN), solver=KernelSteps(CPS())), OWN_STEPS
        ),
        "leave out the solver",
    ),
    # routes
    (lambda: Looks((2, 1)), "increasing order"),
    (lambda: Looks((1,), 0), "at least 1 step"),
    (lambda: planned(Looking(TWO, at=(10,))), "the steps are 0 to 9"),
    (lambda: planned(Looking(Ode(2, DPM2M()), at=(0,))), "completed by Euler steps"),
    (lambda: Thinning((2,), (4, 2), 6), "at which samples stop need as many group sizes"),
    (lambda: Thinning((4, 2), (4, 2), 6), "must increase"),
    (lambda: Thinning((2, 4), (4, 5), 6), "must decrease from 6"),
    (lambda: planned(Thinned(TWO, Thinning((0,), (2,), 6))), "from 1 to 9"),
    (lambda: planned(Thinned(Chain(SDE, 3), Thinning((2,), (2,), 6))), "has 3"),
    (
        lambda: planned(Thinned(Chain(SDE, 2, shared_noise=True), Thinning((2,), (2,), 6))),
        "noise, but this plan has 2",
    ),
    (lambda: planned(Thinned(Tree(SDE, (0,), 2), Thinning((2,), (2,), 6))), "have branches"),
    (lambda: rolled(Thinned(TWO, Thinning((2,), (2,), 6))), "score="),
    (lambda: extremes(torch.zeros(2, 5), 6), "cannot keep 6 of 5"),
    (lambda: RewardGuide(RewardDrift(0.1), probe=0.0), "probe must be above 0"),
    (lambda: planned(Guided(Ode(4), PROBES)), "guidance has no effect"),
    (lambda: best(torch.zeros(1, 4), 4, keep=5), "cannot keep 5 of 4"),
    (lambda: steered((1,), Tree(ConstantSDE(), (2,))), "without branches, each with its own noise"),
    (
        lambda: steered((1,), Chain(ConstantSDE(), 4, shared_noise=True)),
        "without branches, each with its own noise",
    ),
    (lambda: steered((1, 10), Chain(ConstantSDE(), 4)), "the steps are 0 to 9"),
    (lambda: rolled(Particled(Ode(6), SDE, 6, FeynmanKac((3,)), 2, 4)), "pass Sampling"),
    (
        lambda: planned(Particled(Ode(6), SDE, 6, FeynmanKac((3, 9)), 2, 4)),
        r"before the steps \[9\]",
    ),
    (
        lambda: Plan(steps_of(SIGMAS, noisy={0}, train={0}), SDE, 4, route=STEERED),
        "no density",
    ),
    (lambda: along(replace(LOOKED, inner=STEERED)), "leave out looks"),
    (lambda: along(replace(STEERED, inner=LOOKED)), "leave out looks"),
    (lambda: along(GuidedRoute(PROBES, inner=ThinnedRoute(THIN))), "cannot have branches, guides"),
    (lambda: along(ThinnedRoute(THIN, inner=GuidedRoute(PROBES))), "cannot have branches, guides"),
    (lambda: along(KeepingRoute((0,), inner=ThinnedRoute(THIN))), "or kept states"),
    (lambda: along(KeepingRoute((5,))), "rising indices of the plan's 5 steps"),
    (lambda: along(KeepingRoute((3, 1))), "rising indices of the plan's 5 steps"),
    (lambda: along(KeepingRoute((1, 3), 1)), "bridge 1 is none of the later steps"),
    (lambda: Flash(CHAIN), r"must be a number in \(0, 1\], not Chain"),
    (lambda: FlowSDE("0.7"), "must be a number .*not '0.7'"),
    # rolls
    (lambda: rolled(CHAIN, ()), "at least one draw"),
    (lambda: rolled(CHAIN, (3, 3)), "the same id twice"),
    (lambda: two_of_one(SDE), "samples of several sizes cannot be compared step by step"),
    # parts at levels of their own
    (lambda: PartClock((2,), ((1.0, 1.0), (0.0, 0.0))), "a level of each"),
    (lambda: PartClock((2, 2), ((1.0, 1.0), (0.0, 0.1))), "from at most 1 to 0"),
    (lambda: PartClock((2,), ((1.0,), (1.0,), (0.0,))), "step 0: a part must move down"),
    (lambda: PartClock((2, 2), ((0.5, 1.0), (0.6, 0.5), (0.0, 0.0))), "and no part up"),
    (lambda: Clocked(SDE, TURNS).bound(EVEN), "a plan has the model's levels alone"),
    (lambda: on_clock(planned(Ode()), TURNS), "other levels than the model's"),
    (lambda: of_turns(Ode(solver=DPM2M())), "reads one level for all parts"),
    (lambda: of_turns(Looking(otherwise=CHAIN, at=(1,))), "looks at samples in the middle"),
    (lambda: of_turns(Chain(WanSDE(), 2)), "has numbers of one list of levels"),
    (lambda: of_turns(Tree(SDE, at=(2,))), r"step 2 ends a part.*\[0, 1, 3, 4\] can"),
    # texts
    (lambda: TextPlan(0, (2,)), "length must be at least 1"),
    (lambda: TextPlan(6, (2,), temperature=-1.0), "temperature"),
    (lambda: TextPlan(6, (2,), top_p=0.0), "top_p"),
    (lambda: TextPlan(6, (2,), min_p=1.0), r"min_p in \[0, 1\)"),
    (lambda: TextPlan(6, (2, 4, 8), (3, 3)), "must increase"),
    (lambda: TextPlan(6, (2, 4), (6,)), "must increase"),
    (lambda: TextPlan(6, (2, 3), (3,)), "a multiple of the one before"),
    (lambda: TextPlan(6, (4, 8)), "0 cuts make 1 segments"),
    (lambda: TextPlan(6, (2, 4), (2,), forking=Forking(1, 2)), "either forks or cuts"),
    (lambda: TextPlan(6, (2, 4), (2,), greedy=True), "cannot have a greedy completion"),
    (lambda: TextPlan(6, (2, 4), (3,), turns=2), "a tree cannot have several"),
    (lambda: TextPlan(6, (2,), turns=0), "turns must be at least 1"),
    (lambda: Columns((2, 3), *ONES), "column 1 has 3 nodes"),
    (lambda: Columns((2, 4), *ONES, parents=(1,)), "2 columns of nodes need as many numbers"),
    (lambda: Columns((4, 4), *ONES, parents=(3, 4)), "column 0 has 4 nodes: it needs a multiple"),
    (lambda: Forking(0, 1, 1), "at least 1"),
    (lambda: Forking(1, 0, 1), "at least 1"),
    (lambda: Forking(1, 1, 0), "at least 1"),
]


def test_what_makes_no_samples_is_refused_by_a_sentence_each() -> None:
    reached = {refusal_in("samplers", make, sentence) for make, sentence in REFUSED}
    assert refusals_in("samplers").keys() <= reached
