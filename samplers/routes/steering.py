"""Samples with a higher reward from the same weights: search at inference time.

    best         the best of each draw's samples
    importance   samples resampled with weights exp(strength reward)
    steer        Feynman-Kac particles (samplers/routes/particles.py): weighted and resampled during
                 sampling

All of them target p(x) exp(strength reward(x)); `best` is its limit. `Particled` feeds training
with particles.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.host import sent
from samplers.kernels import Kernel
from samplers.noise import uniform
from samplers.number_ranges import AT_LEAST_0, AT_LEAST_1
from samplers.plan import Plan, steps_of
from samplers.planners import Planner, last_step
from samplers.route import Descent, Passage, PlainDescent, Route, RouteRequest, StepWork
from samplers.routes.around import RouteAround
from samplers.routes.particles import (
    FeynmanKac,
    ParticleScore,
    normalised,
    systematic,
)
from samplers.step_tree import StepTree
from samplers.walk import Latents, State, Velocity, Walk


def _flat(index: Int[Tensor, "n m"], group: int) -> Int[Tensor, " nm"]:
    """Convert indices within each draw's rows to indices of all rows."""
    return (index + group * torch.arange(len(index), device=index.device)[:, None]).flatten()


def best(score: Float[Tensor, " n"], group: int, keep: int = 1) -> Int[Tensor, " m"]:
    """Rows of the `keep` best samples of each draw, best first; unscored samples come last."""
    if not 1 <= keep <= group:
        raise ValueError(f"cannot keep {keep} of {group} samples")
    score = torch.where(score.isfinite(), score, -math.inf)
    order = torch.sort(score.view(-1, group), dim=1, descending=True, stable=True).indices
    return _flat(order[:, :keep], group)


def importance(
    score: Float[Tensor, " n"],
    strength: float,
    keys: Sequence[tuple[int | str, ...]],
    keep: int = 1,
) -> Int[Tensor, " m"]:
    """Resample `keep` rows per draw with weights exp(strength * score), with one key per draw."""
    group = len(score) // len(keys)
    log_weights = torch.where(score.isfinite(), strength * score, -math.inf).cpu()
    index = systematic(
        log_weights.view(-1, group), uniform([(*k, "importance") for k in keys]), keep
    )
    return sent(_flat(index, group), score.device)


@dataclass(frozen=True)
class Steered:
    """Result of steering; the particles of a draw are contiguous, like a rollout's leaves."""

    x0: Float[Tensor, "n *d"]
    prompt: Int[Tensor, " n"]
    weight: Float[Tensor, " n"]  # adds to 1 over a draw: what the last weighing left unused
    parents: tuple[Int[Tensor, "draws k"], ...]  # at each weighing: the parent of each particle


@dataclass(frozen=True)
class SteeredRoute(RouteAround):
    """Makes the roots of a draw particles, which are weighted by an intermediate reward and
    resampled: their samples are not the policy's own, so they have no density to train on."""

    how: FeynmanKac

    @property
    def own(self) -> bool:
        return False

    @property
    def asks(self) -> frozenset[RouteRequest]:
        asked: set[RouteRequest] = {"score"}
        return self.inner.asks | asked

    def refuses(self, plan: StepTree, layers: tuple[Route, ...]) -> str | None:
        if any(step.train or step.branch > 1 for step in plan.steps):
            return "steered steps cannot branch or be trained on: they have no density"
        return None

    def work(self, plan: StepTree, k: int) -> StepWork:
        work = self.inner.work(plan, k)
        return work._replace(predicted=work.predicted + work.width) if k in self.how.at else work

    def begin(self, passage: Passage) -> Descent:
        answer = passage.answer("score", "a plan with steering needs an intermediate reward")
        plan = passage.plan

        def score(x0: Tensor, prompt: Tensor) -> Tensor:
            return answer(plan, x0, prompt)

        return SteeredDescent(passage, self.inner.begin(passage), self.how, score)


class SteeredDescent:
    """Particles that pass along a plan without branches."""

    def __init__(
        self, passage: Passage, inner: Descent, how: FeynmanKac, score: ParticleScore
    ) -> None:
        plan, steps = passage.plan, len(passage.plan.steps)
        if any(nodes != plan.roots for nodes in plan.nodes) or plan.states[0] != plan.roots:
            raise ValueError(
                "particles must be the roots of a plan without branches, each with its own noise"
            )
        if wrong := [k for k in how.at if not 0 <= k < steps]:
            raise ValueError(f"steps {wrong} are out of range, the steps are 0 to {steps - 1}")
        self.passage, self.inner, self.how, self.score = passage, inner, how, score
        self.particles = how.begin(len(passage.walk.draws), plan.roots)
        self.parents: list[Int[Tensor, "draws k"]] = []  # of each particle, at each weighing

    def root(self) -> State:
        return self.inner.root()

    def step(self, k: int, at: State) -> State:
        if k in self.how.at:
            sigma = self.passage.plan.steps[k].sigma
            at.v = self.passage.walk.look(at.x, sigma)
            index = self.weigh(at.x - sigma * at.v, k)
            at = at.rows(sent(_flat(index, self.passage.plan.roots), at.x.device))
        return self.inner.step(k, at)

    def weigh(self, x0: Tensor, k: int, last: bool = False) -> Int[Tensor, "draws m"]:
        """Resample by the reward of `x0`: the parent of each particle."""
        walk = self.passage.walk
        r = self.score(x0, walk.prompt(x0)).view(len(walk.draws), -1).cpu()
        keys = [(*walk.key, draw, "resample", k) for draw in walk.draws]
        index, self.particles = self.how.draw(self.how.weigh(self.particles, r, last), keys)
        self.parents.append(index)
        return index


@torch.no_grad()
def steer_plan(
    how: FeynmanKac,
    plan: Plan,
    velocity: Velocity,
    score: ParticleScore,
    latents: Latents,
    draws: Sequence[int],
    *,
    seed: int,
    iteration: int = 0,
) -> Steered:
    """Sample a plan's group as particles. Needs no more network evaluations than `roll`.

    Copies of a particle diverge at the next noisy step, so the plan needs noisy steps after the
    steps `how.at`.
    """
    passage = Passage(Walk(velocity, latents, tuple(draws), (seed, iteration)), plan, 0, {})
    descent = SteeredDescent(passage, PlainDescent(passage), how, score)
    state, steps = descent.root(), len(plan.steps)
    for k in range(steps):
        state = descent.step(k, state)
        passage.edges.clear()  # particles are not trained on
    x0 = state.x[sent(_flat(descent.weigh(state.x, steps, last=True), plan.roots), state.x.device)]
    weight = normalised(descent.particles.log_weight).flatten()
    return Steered(x0, passage.walk.prompt(x0), weight, tuple(descent.parents))


@dataclass(frozen=True)
class Particled:
    """Feynman-Kac steering in iterations `first` <= i < `stop`: a draw's group is a set of
    particles, moved by noisy steps of `kernel` and resampled by intermediate rewards. Other
    iterations use the planner `otherwise`.

    Provides better samples while the policy rarely finds them itself; for likelihoods that need
    clean samples only. The last resampling is left out, since copies of one sample teach nothing
    new. So the samples follow the intermediate potentials, and max and terminal tilt them by more
    than the strength.

    group  samples per prompt, which are the particles, at least 1
    how    when particles are weighted and by what: {at: [...], strength: 10.0, ...}
    first  iteration from which samples are steered, at least 0
    stop   iteration from which they are no longer, at least 0
    """

    otherwise: Planner
    kernel: Kernel
    group: int
    how: FeynmanKac
    first: int
    stop: int

    def __post_init__(self) -> None:
        AT_LEAST_1.check("Particled's group", self.group)
        AT_LEAST_0.check("Particled's first", self.first)
        AT_LEAST_0.check("Particled's stop", self.stop)

    def __call__(self, sigmas: Sequence[float], iteration: int, seed: int) -> tuple[Plan, ...]:
        last = last_step(sigmas)
        if late := [k for k in self.how.at if not 0 <= k < last]:
            raise ValueError(
                f"particles cannot be resampled before the steps {late}: copies only diverge at "
                f"noisy steps, 0 to {last - 1}"
            )
        if not self.first <= iteration < self.stop:
            return self.otherwise(sigmas, iteration, seed)
        steps = steps_of(sigmas, noisy=set(range(last)))
        return (Plan(steps, self.kernel, self.group, route=self.later[0]),)

    @property
    def later(self) -> tuple[Route, ...]:
        return (SteeredRoute(self.how),)
