"""Planners that add intermediate rewards or shrinking groups to another planner's plans."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from samplers.looks import Looks, Thinning
from samplers.plan import Plan
from samplers.planners import Planner, last_step


@dataclass(frozen=True)
class Looking:
    """Adds intermediate rewards to the plans of another planner: the clean samples predicted at
    some steps are scored.

    steps  of the ODE that completes a state: None takes all of the plan's levels, 1 is the
           projection x - sigma v
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
        return tuple(replace(plan, looks=Looks(self.places(plan), self.steps)) for plan in plans)

    def places(self, plan: Plan) -> tuple[int, ...]:
        """Steps before which the plan's states are scored."""
        if self.at == "trained":
            return tuple(k + 1 for k, step in enumerate(plan.steps) if step.train)
        if self.at is not None:
            return self.at
        noisy = [k for k, step in enumerate(plan.steps) if step.noisy]
        return tuple(noisy if self.first else noisy[1:])


@dataclass(frozen=True)
class Thinned:
    """Plans of another planner whose groups shrink during sampling: see `samplers.looks.Thinning`.

    The other planner's group is the group of remaining samples.
    """

    otherwise: Planner
    how: Thinning

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        if wrong := [k for k in self.how.at if not 0 < k <= last_step(sigmas)]:
            raise ValueError(
                f"samples cannot be stopped before the steps {wrong}: choose steps from 1 to "
                f"{last_step(sigmas)}"
            )
        plans = self.otherwise(sigmas, iteration, seed)
        return tuple(replace(plan, thin=self.how) for plan in plans)
