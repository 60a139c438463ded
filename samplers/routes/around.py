"""Parts that the routes of features share: each stands around one that takes the steps."""

from dataclasses import dataclass, field

from samplers.route import Descent, Passage, PlainRoute, Route, RouteRequest, StepWork
from samplers.step_tree import StepTree
from samplers.walk import State


@dataclass(frozen=True)
class RouteAround:
    """A route around `inner`, and what is true of it unless a route says otherwise."""

    inner: Route = field(default=PlainRoute(), kw_only=True)

    splits = False

    @property
    def layers(self) -> tuple[Route, ...]:
        return (self, *self.inner.layers)

    @property
    def asks(self) -> frozenset[RouteRequest]:
        return self.inner.asks

    @property
    def own(self) -> bool:
        return self.inner.own

    @property
    def shares(self) -> bool:
        return False

    def refuses(self, plan: StepTree, layers: tuple[Route, ...]) -> str | None:
        return None

    def work(self, plan: StepTree, k: int) -> StepWork:
        return self.inner.work(plan, k)

    def begin(self, passage: Passage) -> Descent:
        return self.inner.begin(passage)


@dataclass(frozen=True)
class DescentAround:
    """A descent around another one."""

    passage: Passage
    inner: Descent

    def root(self) -> State:
        return self.inner.root()

    def step(self, k: int, at: State) -> State:
        return self.inner.step(k, at)
