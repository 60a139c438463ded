"""Run plans with a velocity model."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.particles import ParticleScore
from samplers.plan import Columns, Plan
from samplers.steering import Steering
from samplers.walk import Begin, Edges, State, Velocity, Walk

__all__ = ["Begin", "Edges", "Rollout", "Velocity", "roll"]


@dataclass(frozen=True)
class Rollout:
    """Leaves of one draw are contiguous: leaf i belongs to row i // plan.group of `draws`.

    `seed`, `iteration`, `draws` and `index` (the plan's place among its iteration's plans) key all
    noise that has to do with these samples.
    """

    plan: Plan
    x0: Float[Tensor, "n *d"]
    prompt: Int[Tensor, " n"]
    draws: tuple[int, ...]
    edges: tuple[Edges, ...]
    seed: int
    iteration: int
    index: int

    @property
    def columns(self) -> Columns:
        return self.plan.columns

    @property
    def lengths(self) -> Int[Tensor, " n"]:
        """Decisions of each sample that are trained on: noisy steps here, tokens in text."""
        return torch.full((len(self.prompt),), len(self.edges), device=self.prompt.device)

    @property
    def nodes(self) -> None:
        """Trees of steps are uniform: which node a sample passed follows from its place."""
        return None

    @property
    def exists(self) -> None:
        """Every sample has every step."""
        return None

    @property
    def states(self) -> None:
        """No two steps of different samples are taken in the same state but a tree's."""
        return None


@dataclass(frozen=True)
class _Trunk:
    """States without noise but the root's, kept for the plans that pass them too."""

    shared: frozenset[tuple[object, ...]]
    states: dict[tuple[object, ...], State] = field(default_factory=dict)

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> "_Trunk":
        passed = Counter(p.trunk(k) for p in plans for k in range(len(p.steps)))
        return cls(frozenset(t for t, times in passed.items() if t is not None and times > 1))

    def keep(self, place: tuple[object, ...] | None, state: State) -> None:
        if place is not None and place in self.shared:
            self.states[place] = state

    def descend(self, walk: Walk, plan: Plan, index: int) -> tuple[State, tuple[Edges, ...]]:
        """The plan's leaves, and its trained transitions."""
        places = [plan.trunk(k) for k in range(len(plan.steps) + 1)]
        state, start = walk.root(plan), 0
        for k, place in enumerate(places):
            if place is not None and place in self.states:
                state, start = self.states[place], k
        edges: list[Edges] = []
        for k in range(start, len(plan.steps)):
            self.keep(places[k], state)
            state, edge = walk.advance(plan, index, k, state)
            edges += [edge] if edge is not None else []
        return state, tuple(edges)


@torch.no_grad()
def roll(  # noqa: PLR0913 the settings behind the star are one call's, by name
    plans: Sequence[Plan],
    velocity: Velocity,
    shape: tuple[int, ...],
    draws: Sequence[int],
    *,
    seed: int,
    iteration: int,
    keep_mean: bool = False,
    score: ParticleScore | None = None,
    begin: Begin | None = None,
    on_rollout: Callable[[Rollout], None] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Rollout, ...]:
    """Draw each plan's group of samples of `shape` for each of `draws`, ids that key the noise.

    The velocity's `prompt` argument is the place of a state's draw in `draws`. Steps without noise
    that several plans begin with are computed once. `keep_mean` stores the sampling policy's means
    with the edges, one more latent a trained node. Noise is drawn on the CPU in float32, so it is
    the same on every device and in every dtype. A plan that steers calls `score` on the way.
    `begin` makes the first states of that noise, where they are not the noise itself. `on_rollout`
    is called with each rollout but the last, as soon as it is drawn.
    """
    if not draws:
        raise ValueError("roll needs at least one draw")
    if len(set(draws)) < len(draws):
        raise ValueError(f"draws {list(draws)} repeat: two draws with one id would be one sample")
    like = torch.empty(0, device=device, dtype=dtype)
    walk = Walk(velocity, tuple(shape), tuple(draws), (seed, iteration), like, keep_mean, begin)
    trunk = _Trunk.of(plans)
    rollouts = []
    for index, plan in enumerate(plans):
        if plan.steer is not None:
            if score is None:
                raise ValueError("a plan that steers needs the reward on the way: pass `score`")
            (x0, _, _), edges = Steering(plan.steer, walk, plan, index, score).descend(), ()
        else:
            state, edges = trunk.descend(walk, plan, index)
            x0 = state.children(plan.group // plan.states[-1]).x
        rollouts.append(
            Rollout(plan, x0, walk.prompt(x0), walk.draws, edges, seed, iteration, index)
        )
        if on_rollout is not None and index + 1 < len(plans):
            on_rollout(rollouts[-1])
    return tuple(rollouts)
