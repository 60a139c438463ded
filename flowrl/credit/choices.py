"""The choices of an algorithm, and how its parts refuse a combination.

Each check belongs to the higher of the two packages that it compares: credit checks plans,
likelihoods check plans and credit, losses check credit and likelihoods. Samplers check nothing.
"""

from collections.abc import Callable, Sequence
from inspect import isroutine
from typing import Any, Protocol, runtime_checkable

from flowrl.credit.trackers import Tracker
from flowrl.credit.values import Transform
from flowrl.errors import UserError
from samplers import Plan, Planner, Route
from samplers.completions import TextPlan, TextPlanner
from samplers.planners import ChangesRoute

AnyPlanner = Planner | TextPlanner
AnyPlan = Plan | TextPlan


@runtime_checkable
class Choices(Protocol):
    """An algorithm under construction.

    plan        the planner
    plans       the plans of iteration 0: see `first_plans`
    transforms  of the advantage, in order
    behaviour   the policy that samples: "current", or an average's name
    tracker     statistics that credit keeps between iterations: `NoTracker` for none
    """

    @property
    def plan(self) -> AnyPlanner: ...

    @property
    def plans(self) -> Sequence[AnyPlan]: ...

    @property
    def transforms(self) -> tuple[Transform, ...]: ...

    @property
    def likelihood(self) -> object: ...

    @property
    def behaviour(self) -> str: ...

    @property
    def tracker(self) -> Callable[[], Tracker]: ...


@runtime_checkable
class Refusing(Protocol):
    """A part that can refuse a combination. A part without this method accepts everything."""

    def refuses(self, choices: Choices) -> str | None:
        """A sentence with the problem and the fix, or None if the part fits."""
        ...


@runtime_checkable
class ComparesByRewards(Protocol):
    """A transform that compares samples by further rewards of the run, which have weight 0 there:
    `compares_by` are their labels."""

    @property
    def compares_by(self) -> tuple[str, ...]: ...


def named_rewards(transforms: Sequence[Transform]) -> tuple[str, ...]:
    """Labels of the rewards that transforms read by name, in the order of the transforms."""
    named = (part.compares_by for part in transforms if isinstance(part, ComparesByRewards))
    return tuple(label for labels in named for label in labels)


def check_parts(parts: Sequence[object], choices: Choices) -> None:
    """Raise UserError with the first refusal among the parts."""
    if sentence := refusal(parts, choices):
        raise UserError(sentence)


def refusal(parts: Sequence[object], choices: Choices) -> str | None:
    """The first refusal among the parts."""
    sentences = (part.refuses(choices) for part in parts if isinstance(part, Refusing))
    return next((sentence for sentence in sentences if sentence is not None), None)


def first_plans(planner: AnyPlanner, steps: int) -> Sequence[AnyPlan]:
    """Plans of iteration 0 on evenly spaced noise levels, since the model's levels are not known
    yet.

    UserError if the planner does not fit the number of steps.
    """
    if steps < 1:
        raise UserError(f"steps must be at least 1, not {steps}")
    sigmas = [1 - k / steps for k in range(steps)] + [0.0]
    try:
        return plans_of(planner, sigmas, 0, 0)
    except ValueError as problem:
        raise UserError(f"the plan does not fit {steps} steps: {problem}") from problem


def plans_of(
    planner: AnyPlanner, sigmas: Sequence[float], iteration: int, seed: int
) -> tuple[AnyPlan, ...]:
    """The plans of an iteration. UserError for a planner that returns anything but plans of one
    kind, at least one."""
    name = planner.__name__ if isroutine(planner) else type(planner).__name__
    returned: Any = planner(sigmas, iteration, seed)  # a user's planner may return anything
    form = "a planner returns a tuple of samplers.Plan, or of samplers.completions.TextPlan"
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        noun = "None" if returned is None else f"a {type(returned).__name__}"
        raise UserError(f"{name} returned {noun}, but {form}")
    plans: tuple[Any, ...] = (*returned,)  # type: ignore[reportUnknownVariableType]
    if not plans:
        raise UserError(
            f"{name} returned no plan for iteration {iteration}, but {form}, with at least one plan"
        )
    for kind in (Plan, TextPlan):
        if all(isinstance(plan, kind) for plan in plans):
            for plan in plans:
                _check_nodes(name, plan)
            return plans
    kinds = ", ".join(dict.fromkeys(type(plan).__name__ for plan in plans))
    raise UserError(f"{name} returned a tuple of {kinds}, but {form}")


def _check_nodes(name: str, plan: AnyPlan) -> None:
    """UserError for a plan of a user's class whose nodes are not those of its steps."""
    if type(plan) is Plan or not isinstance(plan, Plan):
        return
    nodes, counts = plan.roots, list[int]()
    for step in plan.steps:
        nodes *= step.branch
        counts.append(nodes)
    if (plan.nodes, plan.group) != (tuple(counts), counts[-1]):
        raise UserError(
            f"{name} returned a {type(plan).__name__} that says it has {plan.nodes} nodes and a "
            f"group of {plan.group}, but its steps make {tuple(counts)} nodes: leave nodes and "
            "group to samplers.Plan, which computes them from roots and steps"
        )


def image_plans(choices: Choices) -> list[Plan]:
    return [plan for plan in choices.plans if isinstance(plan, Plan)]


def text_plans(choices: Choices) -> list[TextPlan]:
    return [plan for plan in choices.plans if isinstance(plan, TextPlan)]


def routes_of(planner: AnyPlanner, plans: Sequence[AnyPlan]) -> list[Route]:
    """The routes of image plans, of iteration 0 and of later iterations that take another one."""
    later = planner.later if isinstance(planner, ChangesRoute) else ()
    return [*(plan.route for plan in plans if isinstance(plan, Plan)), *later]


def samples_itself(choices: Choices) -> bool:
    """Whether all samples are the policy's own, with the densities of their steps, in every
    iteration."""
    return all(route.own for route in routes_of(choices.plan, choices.plans))


def independent(planner: AnyPlanner, plans: Sequence[AnyPlan]) -> bool:
    """Whether all samples are drawn independently and in the same way: no trees (also none that
    branch at the first step), no particles, no greedy completions."""
    return all(route.own for route in routes_of(planner, plans)) and all(
        set(plan.columns.nodes) == {plan.group}
        and set(plan.columns.families) == {1}
        and not (isinstance(plan, TextPlan) and (plan.forking or plan.greedy))
        for plan in plans
    )
