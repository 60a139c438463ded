"""Noisy steps that are sampled along a reward, while their density stays the plain step's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from samplers.kernels import per_row
from samplers.plan import Plan
from samplers.planners import Planner
from samplers.route import Descent, Passage, Predicted, RouteRequest, StepWork
from samplers.routes.around import RouteAround
from samplers.routes.drift import RewardDrift
from samplers.step_tree import StepTree
from samplers.walk import Edges, State, Walk, level_of, of_children


@dataclass(frozen=True)
class RewardGuide:
    """Shifts noisy steps from step `first` on by a reward of the predicted clean sample, x0(x) = x
    - sigma v(x).

        g = (r(x0(x + probe u)) - r(x0(x - probe u))) / (2 probe) u, u random signs  (probes: SPSA)
        g = dr / dx0 at x0(x)                                                         (slope)

    Probes need no derivative of the reward, and cost two evaluations and two rewards per state. The
    slope treats v as a constant, so it needs one reward, and neither an evaluation nor a gradient
    of the network. Training uses the density of the plain step.

    drift  how far a step is shifted: {scale: 0.1, ...}
    first  step from which steps are shifted, at least 0
    probe  length of a probe in the state's units, above 0
    by     how the gradient is found: `probes` or `slope`, as above
    """

    drift: RewardDrift = RewardDrift()
    first: int = 0
    probe: float = 0.1
    by: Literal["probes", "slope"] = "probes"

    def __post_init__(self) -> None:
        if not 0 < self.probe < math.inf or self.first < 0:
            raise ValueError(
                f"probe must be above 0 and first at least 0, not {self.probe} and {self.first}"
            )

    def moves(self, plan: StepTree, k: int) -> bool:
        """Whether step k is sampled by another kernel than the one that scores it."""
        return plan.steps[k].noisy and k >= self.first


@dataclass(frozen=True)
class GuidedRoute(RouteAround):
    guide: RewardGuide

    @property
    def shares(self) -> bool:
        return self.inner.shares

    @property
    def asks(self) -> frozenset[RouteRequest]:
        asked: set[RouteRequest] = {"moved", "slope" if self.guide.by == "slope" else "score"}
        return self.inner.asks | asked

    def work(self, plan: StepTree, k: int) -> StepWork:
        work = self.inner.work(plan, k)
        if not self.guide.moves(plan, k):
            return work
        ends = 2 if self.guide.by == "probes" else 0
        said = "guided by a slope" if ends == 0 else "guided by probes"
        return work._replace(
            evaluations=work.evaluations + ends * plan.states[k],
            predicted=work.predicted + max(1, ends) * plan.states[k],
            words=", ".join(filter(None, (work.words, said))),
        )

    def begin(self, passage: Passage) -> Descent:
        if self.guide.by == "slope":
            answer = passage.answer("slope", "a plan with gradient guidance needs reward gradients")
        else:
            answer = passage.answer("score", "a guided plan needs an intermediate reward")
        walk = GuidedWalk(**vars(passage.walk), guide=self.guide, answer=answer)
        return self.inner.begin(replace(passage, walk=walk))


@dataclass(frozen=True)
class GuidedEdges(Edges):
    """Transitions of a guided step. `moved`: how far the guide moved the mean, in stds per dim."""

    moved: Float[Tensor, " c"] = field(kw_only=True)


@dataclass(frozen=True)
class GuidedWalk(Walk):
    """A walk whose noisy steps are moved along a reward.

    answer  rewards [n], or their gradients [n *d], of predicted clean samples
    """

    guide: RewardGuide = field(kw_only=True)
    answer: Predicted = field(kw_only=True)

    def draw(self, plan: StepTree, index: int, k: int, at: State) -> tuple[State, Edges | None]:
        if not self.guide.moves(plan, k):
            return super().draw(plan, index, k, at)
        plain = self.step_density(plan, k, at)
        levels = (level_of(at.x, s) for s in (plan.steps[k].sigma, plan.steps[k].sigma_next))
        by = self.slopes if self.guide.by == "slope" else self.probes
        pushed = self.guide.drift(plain, by(plan, index, k, at, plain.mean), *levels).mean
        after, edges = self.drawn(plan, index, k, at, plain, pushed)
        if edges is None:
            return after, None
        times = plan.states[k + 1] // plan.states[k]
        mean, std, pushed = (of_children(times, tensor) for tensor in (*plain, pushed))
        moved = (pushed - mean).flatten(1).square().mean(1).sqrt() / std
        return after, GuidedEdges(**vars(edges), moved=moved)

    def slopes(self, plan: StepTree, index: int, k: int, at: State, mean: Tensor) -> Tensor:
        """Reward gradients at the predicted clean samples; 0 for samples without a score."""
        assert at.v is not None
        x0 = at.x - plan.steps[k].sigma * at.v
        return self.answer(plan, x0, self.prompt(x0)).to(mean).nan_to_num(0.0)

    def probes(self, plan: StepTree, index: int, k: int, at: State, mean: Tensor) -> Tensor:
        """Estimated reward gradients at the states; 0 for states without a score."""
        sigma, probe = plan.steps[k].sigma, self.guide.probe
        u = self.noise(plan.states[k], "probe", index, k).sign()
        ends: list[Tensor] = []
        for x in (at.x + probe * u, at.x - probe * u):
            x0 = x - sigma * self.look(x, sigma)
            ends.append(self.answer(plan, x0, self.prompt(x0)).to(mean))
        change = ((ends[0] - ends[1]) / (2 * probe)).nan_to_num(0.0)
        return per_row(change, u) * u.to(mean)


@dataclass(frozen=True)
class Guided:
    """Plans of another planner whose noisy steps are shifted along a reward's gradient.

    guide  how steps are shifted: the part `reward_guide` with its settings
    """

    otherwise: Planner
    guide: RewardGuide

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        plain = self.otherwise(sigmas, iteration, seed)
        if not any(self.guide.moves(plan, k) for plan in plain for k in range(len(plan.steps))):
            raise ValueError(
                f"guidance has no effect: no step from step {self.guide.first} on is noisy"
            )
        return tuple(
            replace(plan, route=GuidedRoute(self.guide, inner=plan.route)) for plan in plain
        )
