"""Intermediate states that stay with a rollout, for gradients through them."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from samplers.plan import Plan
from samplers.roll import Rollout
from samplers.route import Descent, Passage, Route
from samplers.routes.around import DescentAround, RouteAround
from samplers.step_tree import StepTree
from samplers.walk import State


@dataclass(frozen=True)
class KeptState:
    """The states before a step."""

    step: int
    x: Float[Tensor, "n *d"]

    def with_clean(self, change: Callable[[Tensor], Tensor]) -> "KeptState":
        return self  # its states are noisy


@dataclass(frozen=True)
class KeepingRoute(RouteAround):
    """Keeps the states before the steps `keep`, in rising order (`KeptState`); the gradient of the
    earlier ones passes through the one before step `bridge`."""

    keep: tuple[int, ...]
    bridge: int | None = None

    def refuses(self, plan: StepTree, layers: tuple[Route, ...]) -> str | None:
        last = len(plan.steps)
        if set(self.keep) - set(range(last)) or sorted(set(self.keep)) != [*self.keep]:
            return f"keep {self.keep} takes rising indices of the plan's {last} steps"
        if self.bridge is not None and self.bridge not in self.keep[1:]:
            return f"bridge {self.bridge} is none of the later steps of keep {self.keep}"
        return None

    def begin(self, passage: Passage) -> Descent:
        return KeepingDescent(passage, self.inner.begin(passage), self.keep)


@dataclass(frozen=True)
class KeepingDescent(DescentAround):
    keep: tuple[int, ...]

    def step(self, k: int, at: State) -> State:
        if k in self.keep:
            self.passage.notes.append(KeptState(k, at.x))
        return self.inner.step(k, at)


def kept_steps(plan: Plan) -> tuple[int, ...]:
    """The steps whose states a plan's route keeps, in rising order."""
    steps = (route.keep for route in plan.route.layers if isinstance(route, KeepingRoute))
    return next(steps, ())


def bridge_of(plan: Plan) -> int | None:
    """The kept step that gradients of earlier ones pass through, if there is one."""
    bridges = (route.bridge for route in plan.route.layers if isinstance(route, KeepingRoute))
    return next(bridges, None)


def kept_states(rollout: Rollout) -> dict[int, Float[Tensor, "n *d"]]:
    """The states that a rollout keeps, by the step that they stand before."""
    return {note.step: note.x for note in rollout.notes if isinstance(note, KeptState)}
