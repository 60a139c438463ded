"""Routes of samples along a plan's tree of steps.

`PlainRoute` takes the steps and does nothing else. Every other route stands around one: it looks at
intermediate states, keeps some, chooses which go on, or moves the steps. Each is a file of
`samplers.routes`. It says itself what it costs, what it asks of its caller, and what it refuses;
the plan, the walk and `roll` treat all routes alike, and import none of these files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from samplers.step_tree import StepTree
from samplers.walk import Edges, State, Walk

# (plan, clean samples [n *d], row of the conditioning of each [n]) -> rewards [n], or their
# gradients [n *d]
Predicted = Callable[[StepTree, Tensor, Tensor], Tensor]
RouteRequest = Literal["score", "slope", "seen", "moved"]


@runtime_checkable
class Note(Protocol):
    """A record that a route adds to the rollout of a plan."""

    def with_clean(self, change: Callable[[Tensor], Tensor]) -> "Note":
        """The same with its clean samples changed, if it has any."""
        ...


class StepWork(NamedTuple):
    """Work of a route at a step, per draw.

    width        states that take the step
    nodes        nodes after it
    evaluations  network evaluations, beside those that the plan's own step needs
    predicted    predicted clean samples that are decoded and scored
    stored       of these, samples that stay with the rollout
    words        a description, if there is something to say
    """

    width: int
    nodes: int
    evaluations: int = 0
    predicted: int = 0
    stored: int = 0
    words: str = ""


@dataclass(frozen=True)
class Passage:
    """Some draws that pass along a plan.

    index    of the plan among the iteration's plans
    answers  to what a route asks for while sampling, by name
    edges    trained transitions so far
    notes    of the routes so far
    """

    walk: Walk
    plan: StepTree
    index: int
    answers: Mapping[RouteRequest, Predicted]
    edges: list[Edges] = field(default_factory=list[Edges])
    notes: list[Note] = field(default_factory=list[Note])

    def answer(self, to: Literal["score", "slope"], reason: str) -> Predicted:
        """The function that answers. ValueError, which begins with `reason`, if none was passed."""
        if to not in self.answers:
            raise ValueError(f"{reason}: pass Sampling({to}=...)")
        return self.answers[to]

    def take(self, k: int, at: State, plan: StepTree | None = None) -> State:
        """Take step k, of another plan if one is given."""
        after, edges = self.walk.advance(plan or self.plan, self.index, k, at)
        if edges is not None:
            self.edges.append(edges)
        return after


@runtime_checkable
class Descent(Protocol):
    """A passage from the first states to the leaves."""

    def root(self) -> State: ...

    def step(self, k: int, at: State) -> State: ...


@runtime_checkable
class Route(Protocol):
    """The route of samples along a plan.

    layers  this route and those that it stands around, the outermost first
    asks    what its caller owes it: rewards ("score") or gradients of rewards ("slope") of
            predicted samples while sampling, rewards of the samples in its notes afterwards
            ("seen"), a report of how far it moved the trained steps ("moved")
    own     whether the samples are the policy's own, with the densities of their steps
    shares  whether the states before any noise are those of other plans with the same first steps
    splits  whether some draws alone are sampled in the same calls as with others, so that a plan's
            draws can be sampled in parts
    """

    @property
    def layers(self) -> tuple["Route", ...]: ...

    @property
    def asks(self) -> frozenset[RouteRequest]: ...

    @property
    def own(self) -> bool: ...

    @property
    def shares(self) -> bool: ...

    @property
    def splits(self) -> bool: ...

    def refuses(self, plan: StepTree, layers: tuple["Route", ...]) -> str | None:
        """Why this route, one of the plan's `layers`, cannot go along the plan; None if it can."""
        ...

    def work(self, plan: StepTree, k: int) -> StepWork:
        """Its work at step k."""
        ...

    def begin(self, passage: Passage) -> Descent: ...


@dataclass(frozen=True)
class PlainDescent:
    passage: Passage

    def root(self) -> State:
        return self.passage.walk.root(self.passage.plan)

    def step(self, k: int, at: State) -> State:
        return self.passage.take(k, at)


@dataclass(frozen=True)
class PlainRoute:
    """From the first step to the last, every sample for itself."""

    own = True
    shares = True
    splits = True

    @property
    def layers(self) -> tuple[Route, ...]:
        return (self,)

    @property
    def asks(self) -> frozenset[RouteRequest]:
        return frozenset()

    def refuses(self, plan: StepTree, layers: tuple[Route, ...]) -> str | None:
        return None

    def work(self, plan: StepTree, k: int) -> StepWork:
        return StepWork(plan.states[k], plan.nodes[k])

    def begin(self, passage: Passage) -> Descent:
        return PlainDescent(passage)
