"""A sampler's plan as data: a tree of steps, and the route that samples take along it."""

from collections.abc import Iterable
from dataclasses import dataclass

from samplers.moved import with_moved
from samplers.route import PlainRoute, Route
from samplers.step_tree import Columns, Step, StepTree, steps_of

__all__ = ["Columns", "Plan", "Step", "StepTree", "evaluations", "steps_of"]


@with_moved
@dataclass(frozen=True)
class Plan(StepTree):
    """A tree of steps (`StepTree`), and the route along it.

    `route` is `PlainRoute`, or one of `samplers.routes` around it, with which rewards look at
    intermediate states, steer them or move their steps. Raises ValueError for a route that cannot
    go along these steps.
    """

    route: Route = PlainRoute()

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = self.route.layers
        for layer in layers:
            if problem := layer.refuses(self, layers):
                raise ValueError(problem)

    @property
    def predicted(self) -> int:
        """Predicted clean samples per draw that are decoded and scored."""
        return sum(self.route.work(self, k).predicted for k in range(len(self.steps)))

    @property
    def stored(self) -> int:
        """Predicted clean samples per draw that stay with the rollout."""
        return sum(self.route.work(self, k).stored for k in range(len(self.steps)))

    @property
    def evaluations(self) -> int:
        """Network evaluations per draw of this plan alone."""
        return evaluations((self,))

    def step_evaluations(self, k: int) -> int:
        """Network evaluations per draw of step k of this plan alone."""
        work, step = self.route.work(self, k), self.steps[k]
        per_state = 1 if step.noisy else self.solver_at(k).evaluations(step.sigma_next)
        return work.width * per_state + work.evaluations

    def trunk(self, k: int) -> tuple[object, ...] | None:
        """Key of the state before step k, beside the draws and root noise; None after the first
        noisy step.

        Two plans of an iteration with the same trunk are in the same state there.
        """
        if not self.route.shares or any(self.stochastic(j) for j in range(k)):
            return None
        start = (self.roots, self.shared_noise, self.solver, self.solve_from, len(self.steps))
        return (*start, self.sigmas[: k + 1])


def evaluations(plans: Iterable[Plan]) -> int:
    """Network evaluations per draw in one iteration's plans; evaluations that plans share count
    once."""
    alone, shared = 0, dict[object, int]()
    for plan in plans:
        for k, step in enumerate(plan.steps):
            before, after = plan.trunk(k), plan.trunk(k + 1)
            more = 0 if step.noisy else plan.solver_at(k).evaluations(step.sigma_next) - 1
            work = plan.route.work(plan, k)
            alone += work.evaluations
            if before is None:
                alone += work.width * (1 + more)
                continue
            shared[before] = plan.states[k]
            if after is None:
                alone += plan.states[k + 1] * more
            else:
                shared["more", after] = plan.states[k] * more
    return alone + sum(shared.values())
