"""Predicted clean samples of intermediate states that are scored after sampling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from samplers.kernels import euler
from samplers.plan import Plan
from samplers.planners import Planner
from samplers.route import Descent, Passage, Route, RouteRequest, StepWork
from samplers.routes.around import DescentAround, RouteAround
from samplers.solvers import Euler
from samplers.step_tree import StepTree
from samplers.walk import State, level_of


@dataclass(frozen=True)
class Looks:
    """Intermediate rewards: the states before the steps `at` are completed by an ODE of `steps`
    Euler steps and scored.

    The levels are the plan's own: None takes all that remain, and fewer steps spread over them. One
    step is the projection x - sigma v, whose evaluation the plan needs anyway.
    """

    at: tuple[int, ...]
    steps: int | None = None

    def __post_init__(self) -> None:
        if list(self.at) != sorted(set(self.at)):
            raise ValueError(
                "steps of intermediate rewards must be different and in increasing order, got "
                f"{self.at}"
            )
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"a completion needs at least 1 step, not {self.steps}")

    def levels(self, sigmas: Sequence[float], k: int) -> tuple[float, ...]:
        """Noise levels that complete a state from before step k."""
        left = tuple(sigmas[k:])
        last = len(left) - 1
        if self.steps is None or self.steps >= last:
            return left
        return tuple(left[round(last * i / self.steps)] for i in range(self.steps + 1))

    def more(self, sigmas: Sequence[float], k: int) -> int:
        """Network evaluations that a completion adds to the plan's own evaluation of its state."""
        return len(self.levels(sigmas, k)) - 2


@dataclass(frozen=True)
class Seen:
    """Predicted clean samples of the distinct states before one step; samples of a draw are
    contiguous."""

    step: int
    x0: Float[Tensor, "m *d"]
    prompt: Int[Tensor, " m"]

    def with_clean(self, change: Callable[[Tensor], Tensor]) -> "Seen":
        return replace(self, x0=change(self.x0))


@dataclass(frozen=True)
class LookedRoute(RouteAround):
    """Notes predicted clean samples (`Seen`) of intermediate states, for rewards that score them
    afterwards."""

    looks: Looks

    @property
    def asks(self) -> frozenset[RouteRequest]:
        asked: set[RouteRequest] = {"seen"}
        return self.inner.asks | asked

    def refuses(self, plan: StepTree, layers: tuple[Route, ...]) -> str | None:
        at, last = self.looks.at, len(plan.steps) - 1
        if not all(layer.own for layer in layers):
            return "steer already scores intermediate states: leave out looks"
        if at and not 0 <= at[0] <= at[-1] <= last:
            return f"intermediate rewards before the steps {at}, but the steps are 0 to {last}"
        if plan.solver != Euler():
            return (
                f"intermediate states are completed by Euler steps, but this plan has the solver "
                f"{plan.solver}"
            )
        return None

    def work(self, plan: StepTree, k: int) -> StepWork:
        work = self.inner.work(plan, k)
        if k not in self.looks.at:
            return work
        states, more = plan.states[k], self.looks.more(plan.sigmas, k)
        scored_state = "its projection" if more == 0 else f"its completion of {1 + more} steps"
        scored = f"{states} {'state' if states == 1 else 'states'} scored by {scored_state}"
        return work._replace(
            evaluations=work.evaluations + states * more,
            predicted=work.predicted + states,
            stored=work.stored + states,
            words=", ".join(filter(None, (work.words, scored))),
        )

    def begin(self, passage: Passage) -> Descent:
        return LookedDescent(passage, self.inner.begin(passage), self.looks)


@dataclass(frozen=True)
class LookedDescent(DescentAround):
    looks: Looks

    def step(self, k: int, at: State) -> State:
        if k in self.looks.at:
            self.passage.notes.append(self.completed(k, at))
        return self.inner.step(k, at)

    def completed(self, k: int, at: State) -> Seen:
        """Predict the clean samples of the states before step k with the plan's ODE."""
        walk, plan = self.passage.walk, self.passage.plan
        if at.v is None:
            at.v = walk.look(at.x, plan.steps[k].sigma)
        x, v = at.x, at.v
        for sigma, sigma_next in pairwise(self.looks.levels(plan.sigmas, k)):
            v = walk.look(x, sigma) if v is None else v
            x = euler(x, v, level_of(x, sigma), level_of(x, sigma_next)).to(at.x.dtype)
            v = None
        x = walk.blended(plan, len(plan.steps) - 1, x, at.root)
        return Seen(k, x, walk.prompt(x))


@dataclass(frozen=True)
class Looking:
    """Adds intermediate rewards to the plans of another planner: the clean samples predicted at
    some steps are scored.

    steps  of the ODE that completes a state, at least 1: None takes all of the plan's levels, 1 is
           the projection x - sigma v
    first  whether the state before the first noisy step is scored
    at     the states before these steps; None: before every noisy step, since nothing is random in
           between; "trained": the states that trained steps end in
    """

    otherwise: Planner
    steps: int | None = None
    first: bool = True
    at: tuple[int, ...] | Literal["trained"] | None = None

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        plans = self.otherwise(sigmas, iteration, seed)
        return tuple(
            replace(plan, route=LookedRoute(Looks(self.places(plan), self.steps), inner=plan.route))
            for plan in plans
        )

    def places(self, plan: Plan) -> tuple[int, ...]:
        """Steps before which the plan's states are scored."""
        if self.at == "trained":
            return tuple(k + 1 for k, step in enumerate(plan.steps) if step.train)
        if self.at is not None:
            return self.at
        noisy = [k for k, step in enumerate(plan.steps) if step.noisy]
        return tuple(noisy if self.first else noisy[1:])
