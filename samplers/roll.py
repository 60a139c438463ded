"""Run plans with a velocity model."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from samplers.host import filled_rows
from samplers.layout import Layout
from samplers.noise import NoiseKind
from samplers.plan import Columns, Plan
from samplers.route import Descent, Note, Passage, Predicted, RouteRequest
from samplers.step_tree import StepTree
from samplers.storage import Storage
from samplers.walk import Begin, Edges, Latents, State, Velocity, Walk

__all__ = ["Begin", "Edges", "Latents", "Rollout", "Sampling", "Velocity", "roll"]


@dataclass(frozen=True)
class Rollout:
    """Sampled trajectories. The leaves of a draw are contiguous: leaf i belongs to draw i //
    plan.group of `draws`.

    `seed`, `iteration`, `draws` and `index` (of the plan among the iteration's plans) key all noise
    of these samples. `notes` are what the plan's route wrote down, such as predicted clean samples.

    Unlike a rollout of texts it has no `nodes`: trees of steps are uniform, so the node that a
    sample passed follows from its index.
    """

    nodes = None

    plan: Plan
    x0: Float[Tensor, "n *d"]
    prompt: Int[Tensor, " n"]
    draws: tuple[int, ...]
    edges: tuple[Edges, ...]
    seed: int
    iteration: int
    index: int
    notes: tuple[Note, ...] = ()
    storage: Storage = Storage()  # how states are kept for training
    noise: NoiseKind = "generator"  # that drew these samples, and what training adds to them
    free: Bool[Tensor, "p *d"] | None = None  # entries that are sampled, by prompt; None: all
    layout: Layout | None = None  # the parts of flat states

    @property
    def by_size(self) -> tuple["Rollout", ...]:
        """A rollout for each size of its samples: itself."""
        return (self,)

    @property
    def columns(self) -> Columns:
        return self.plan.columns

    @property
    def lengths(self) -> Int[Tensor, " n"]:
        """Number of trained decisions per sample: noisy steps here, tokens in text."""
        return filled_rows(len(self.prompt), len(self.edges), torch.long, self.prompt.device)


@dataclass(frozen=True)
class _Trunk:
    """States before the noise of any step, kept for other plans that pass through them."""

    shared: frozenset[tuple[object, ...]]
    states: dict[tuple[object, ...], State] = field(default_factory=dict[tuple[object, ...], State])

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> "_Trunk":
        if len(plans) == 1:
            return cls(frozenset())
        passed = Counter(p.trunk(k) for p in plans for k in range(len(p.steps)))
        return cls(frozenset(t for t, times in passed.items() if t is not None and times > 1))

    def keep(self, key: tuple[object, ...] | None, state: State) -> None:
        if key is not None and key in self.shared:
            self.states[key] = state

    def descend(self, descent: Descent, plan: Plan) -> State:
        """Sample a plan's leaves, from the first state that no other plan has passed."""
        state, start = descent.root(), 0
        keys = [plan.trunk(k) for k in range(len(plan.steps) + 1)] if self.shared else []
        for k, key in enumerate(keys):
            if key is not None and key in self.states:
                state, start = self.states[key], k
        for k in range(start, len(plan.steps)):
            if keys:
                self.keep(keys[k], state)
            state = descent.step(k, state)
        return state


R = TypeVar("R")


@dataclass(frozen=True)
class Sampling(Generic[R]):
    """Options of sampling beside the plans. R is the kind of rollout, of latents or of text.

    keep_mean   store the sampling policy's means with the edges: one more latent per trained node
    score       rewards [n] of predicted samples, for plans whose route asks for them
    slope       gradients [n *d] of these rewards with respect to the predicted samples, likewise
    on_rollout  called with each rollout except the last, as soon as it is sampled
    on_slice    called with each slice of a single rollout's draws as soon as it is sampled, where
                there are several; a slice's `prompt` counts from the first of all draws
    aside       context manager entered around evaluations whose density is not stored: steps that
                no plan trains
    """

    keep_mean: bool = False
    score: Callable[[R], Tensor] | None = None
    slope: Callable[[R], Tensor] | None = None
    on_rollout: Callable[[R], None] | None = None
    on_slice: Callable[[R], None] | None = None
    aside: Callable[[], AbstractContextManager[None]] | None = None

    def announce(self, rollouts: Sequence[R], plans: int) -> None:
        """Call `on_rollout` with the newest rollout, unless it is the last plan's."""
        if self.on_rollout is not None and len(rollouts) < plans:
            self.on_rollout(rollouts[-1])


@torch.no_grad()
def roll(
    plans: Sequence[Plan],
    velocity: Velocity,
    latents: Latents,
    draws: Sequence[int],
    *,
    seed: int,
    iteration: int,
    sampling: Sampling[Rollout] = Sampling(),
) -> tuple[Rollout, ...]:
    """Sample each plan's group for each of `draws`, the ids that key the noise.

    The velocity's `prompt` argument is the index of a state's draw in `draws`. Steps without noise
    that several plans begin with are computed once. ValueError if there are no draws or an id
    repeats.
    """
    if not draws:
        raise ValueError("roll needs at least one draw")
    if len(set(draws)) < len(draws):
        raise ValueError(
            f"draws {list(draws)} contain the same id twice: both would be the same sample"
        )

    aside = sampling.aside
    walk = Walk(
        velocity,
        latents,
        tuple(draws),
        key=(seed, iteration),
        keep_mean=sampling.keep_mean,
        aside=aside,
    )
    whole = nullcontext()
    if aside is not None and not any(step.train for plan in plans for step in plan.steps):
        whole, walk = aside(), replace(walk, aside=None)
    with whole:
        return _rolled(plans, walk, sampling)


def _rolled(plans: Sequence[Plan], walk: Walk, sampling: Sampling[Rollout]) -> tuple[Rollout, ...]:
    trunk = _Trunk.of(plans)
    rollouts: list[Rollout] = []
    for index, plan in enumerate(plans):
        passage = Passage(walk, plan, index, _answers(sampling, walk, index))
        leaves = trunk.descend(plan.route.begin(passage), plan)
        x0 = leaves.children(plan.group // plan.states[-1]).x
        rollout = _rollout(plan, x0, walk.prompt(x0), walk, index)
        rollout = replace(rollout, edges=tuple(passage.edges), notes=tuple(passage.notes))
        rollouts.append(rollout)
        if sampling.on_rollout is not None:
            sampling.announce(rollouts, len(plans))
    return tuple(rollouts)


def _answers(sampling: Sampling[Rollout], walk: Walk, index: int) -> dict[RouteRequest, Predicted]:
    """Functions of predicted clean samples that a plan's route may ask for while sampling."""

    def answer(of: Callable[[Rollout], Tensor]) -> Predicted:
        def answered(plan: StepTree, x0: Tensor, prompt: Tensor) -> Tensor:
            assert isinstance(plan, Plan), "routes pass on what they were given"
            return of(_rollout(plan, x0, prompt, walk, index))

        return answered

    offered: dict[RouteRequest, Callable[[Rollout], Tensor] | None]
    offered = {"score": sampling.score, "slope": sampling.slope}
    return {name: answer(of) for name, of in offered.items() if of is not None}


def _rollout(plan: Plan, x0: Tensor, prompt: Tensor, walk: Walk, index: int) -> Rollout:
    storage, held = walk.latents.storage, walk.latents.held
    free = None if held is None else held.free
    seed, iteration = walk.key
    return Rollout(
        plan=plan,
        x0=x0,
        prompt=prompt,
        draws=walk.draws,
        edges=(),
        seed=seed,
        iteration=iteration,
        index=index,
        storage=storage,
        noise=walk.latents.noise,
        free=free,
        layout=walk.latents.layout,
    )
