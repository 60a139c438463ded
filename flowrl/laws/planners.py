"""Laws of planners, and of their plans."""

from collections.abc import Sequence

from flowrl.credit.choices import AnyPlan, AnyPlanner, plans_of
from flowrl.errors import UserError
from flowrl.laws.trial import TRIAL_LEVELS, part_title, tried
from samplers import Plan

_ITERATIONS = (0, 1, 7, 40)


def check_planner(
    planner: AnyPlanner, sigmas: Sequence[float] = TRIAL_LEVELS, seed: int = 0
) -> None:
    """Check a planner on a list of noise levels; of texts on as many zeros.

    For several iterations it returns a tuple of plans of one kind, at least one, the same again for
    the same arguments. Image plans start at the first level and end at the last one. The nodes of a
    plan are those that its steps make: the roots, times the children of each step. UserError for a
    planner that breaks one of these laws.
    """
    name = part_title(planner)
    for iteration in _ITERATIONS:
        at, levels = f"{name}, iteration {iteration}", list(sigmas)
        first, again = (
            tried(name, "plan", lambda i=iteration, g=levels: plans_of(planner, g, i, seed))
            for _ in range(2)
        )
        if first != again:
            raise UserError(
                f"{at}: two calls return different plans, so a resumed run would not sample as an "
                "unbroken one; make the plans a function of the levels, the iteration and the seed"
            )
        if levels != list(sigmas):
            raise UserError(f"{at}: it changes the list of levels that it is given; copy it first")
        for plan in first:
            _check_ends(at, plan, sigmas)


def _check_ends(at: str, plan: AnyPlan, sigmas: Sequence[float]) -> None:
    if isinstance(plan, Plan) and (plan.sigmas[0], plan.sigmas[-1]) != (sigmas[0], sigmas[-1]):
        raise UserError(
            f"{at}: a plan goes from noise level {plan.sigmas[0]:g} to {plan.sigmas[-1]:g}, but "
            f"the levels that it was given go from {sigmas[0]:g} to {sigmas[-1]:g}"
        )
