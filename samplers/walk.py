"""Take one step of a plan at a time."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.held import Held
from samplers.host import derived, filled_rows, on_device, sent
from samplers.kernels import Gaussian, mean_log_prob, per_row
from samplers.kernels import step as kernel_step
from samplers.layout import Layout
from samplers.noise import NoiseKind, keyed_noise
from samplers.solvers import Past, Point
from samplers.step_tree import StepTree
from samplers.storage import Storage

# (x [n *d], sigma [n], row of the conditioning of each x [n]) -> v [n *d]
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
# (noise [n *d], row of the conditioning of each [n]) -> the first states [n *d]
Begin = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Edges:
    """Transitions of one trained step, one row per child node; the rows of a draw are
    contiguous."""

    step: int
    x: Float[Tensor, "c *d"]  # the parent's state, once a child; no copy where branch is 1
    x_next: Float[Tensor, "c *d"]
    mean: Float[Tensor, "c *d"] | None  # of the policy that sampled, if it was asked for
    logp: Float[Tensor, " c"]  # mean over dims, of x_next as it is stored
    prompt: Int[Tensor, " c"]
    by_part: Float[Tensor, "c p"] | None = None  # logp of each part, where states have parts


@dataclass(frozen=True)
class Latents:
    """States of a sampler. Noise is drawn in float32, the same on every device and in every dtype.

    shape    of one state
    begin    turns noise into the first states; None if the noise itself is the first state
    held     the entries that are given instead of sampled; None if there are none
    layout   the parts of flat states; None for states of one tensor
    storage  how the states of trained steps are kept
    noise    drawn on the CPU by torch's generator, or on the device by a counter
    """

    shape: tuple[int, ...]
    device: str | torch.device = "cpu"
    dtype: torch.dtype = torch.float32
    begin: Begin | None = None
    storage: Storage = Storage()
    held: Held | None = None
    noise: NoiseKind = "generator"
    layout: Layout | None = None


@dataclass
class State:
    """All distinct states at one level; the states of a draw are contiguous."""

    x: Tensor
    past: tuple[Past, ...] = ()
    v: Tensor | None = None  # at x, once evaluated
    stored: Tensor | None = None  # x as it is kept for training, if it is
    root: Tensor | None = None  # the first states of these, where entries are held

    def rows(self, index: Tensor) -> "State":
        past = tuple(p.rows(index) for p in self.past)
        x, v = self.x[index], None if self.v is None else self.v[index]
        root = None if self.root is None else self.root[index]
        if self.stored is None or self.stored is self.x:
            return State(x, past, v, None if self.stored is None else x, root)
        return State(x, past, v, self.stored[on_device(index, self.stored.device)], root)

    def children(self, times: int) -> "State":
        """Repeat every state `times` times, with its copies next to each other."""
        if times == 1:
            return self
        index = torch.arange(len(self.x)).repeat_interleave(times)
        return self.rows(sent(index, self.x.device))


@dataclass(frozen=True)
class Walk:
    """Advances the states of some draws along a plan. `index` is the plan's index in its
    iteration."""

    velocity: Velocity
    latents: Latents
    draws: tuple[int, ...]
    key: tuple[int, int]  # seed, iteration
    keep_mean: bool = False
    aside: Callable[[], AbstractContextManager[None]] | None = None  # around untrained steps

    def prompt(self, x: Tensor) -> Int[Tensor, " n"]:
        rows = torch.arange(len(self.draws)).repeat_interleave(len(x) // len(self.draws))
        return sent(rows, x.device)

    def look(self, x: Tensor, sigma: float) -> Tensor:
        return self.velocity(x, level_of(x, sigma), self.prompt(x))

    def noise(self, nodes: int, *purpose: int | str) -> Tensor:
        """Standard normal noise for `nodes` nodes of each draw."""
        keys = [(*self.key, draw, *purpose, node) for draw in self.draws for node in range(nodes)]
        of = self.latents
        return keyed_noise(of.noise, keys, of.shape, of.dtype, of.device, of.layout)

    def root(self, plan: StepTree) -> State:
        """The initial state: noise, or `begin` applied to it. All plans of an iteration start from
        it."""
        x, begin = self.noise(plan.states[0], "root"), self.latents.begin
        x = x if begin is None else begin(x, self.prompt(x)).to(x.dtype)
        return State(self.rounded(plan, x), root=None if self.latents.held is None else x)

    def blended(self, plan: StepTree, k: int, x: Tensor, root: Tensor | None) -> Tensor:
        """States after step k with the entries that are held."""
        if self.latents.held is None or root is None:
            return x
        last = k == len(plan.steps) - 1
        sigma = None if last else plan.steps[k].sigma_next
        return self.latents.held.put(x, root, self.prompt(x), sigma)

    def free(self, x: Tensor) -> Tensor | None:
        """The entries of these states that are sampled; None for all."""
        held = self.latents.held
        return None if held is None else held.free[self.prompt(x)]

    def rounded(self, plan: StepTree, x: Tensor) -> Tensor:
        """The state from which the sampler continues if states are rounded for storage."""
        if self.latents.storage.dtype is None:
            return x
        trained = any(step.train for step in plan.steps)
        return self.latents.storage.rounded(x) if trained else x

    def advance(self, plan: StepTree, index: int, k: int, at: State) -> tuple[State, Edges | None]:
        """Take step k: the next states, and the transitions if they are trained on."""
        if self.aside is None or plan.steps[k].train:
            return self.step(plan, index, k, at)
        velocity = at.v
        with self.aside():
            after = self.step(plan, index, k, at)
        at.v = velocity  # another plan may train on this state, and evaluates it by itself
        return after

    def step(self, plan: StepTree, index: int, k: int, at: State) -> tuple[State, Edges | None]:
        if at.v is None:
            at.v = self.look(at.x, plan.steps[k].sigma)
        if plan.steps[k].noisy:
            return self.draw(plan, index, k, at)
        return self.solve(plan, index, k, at), None

    def draw(self, plan: StepTree, index: int, k: int, at: State) -> tuple[State, Edges | None]:
        """Take a noisy step, in which every state gets its children."""
        plain = self.step_density(plan, k, at)
        return self.drawn(plan, index, k, at, plain, plain.mean)

    def step_density(self, plan: StepTree, k: int, at: State) -> Gaussian:
        """The density of a noisy step from each state."""
        step, kernel = plan.steps[k], plan.kernel
        assert kernel is not None and at.v is not None  # StepTree.__post_init__; advance
        sigma, sigma_next = level_of(at.x, step.sigma), level_of(at.x, step.sigma_next)
        return kernel_step(kernel, at.x, at.v, sigma, sigma_next)

    def drawn(
        self, plan: StepTree, index: int, k: int, at: State, plain: Gaussian, around: Tensor
    ) -> tuple[State, Edges | None]:
        """Draw the children of each state around `around` [n *d]. Their densities are those of
        `plain`."""
        step, times = plan.steps[k], plan.states[k + 1] // plan.states[k]
        parents = at.children(times)
        mean, std, around = (of_children(times, tensor) for tensor in (*plain, around))
        g = Gaussian(mean, std)
        x_next = (around + per_row(std, mean) * self.step_noise(plan, index, k)).to(at.x.dtype)
        x_next = self.rounded(plan, self.blended(plan, k, x_next, parents.root))
        after = State(x_next, root=parents.root)
        if plan.solver.memory:
            after.past = self.remember(plan, parents, self.point(plan, index, k, parents))
        if not step.train:
            return after, None
        free = None if self.latents.held is None else self.free(x_next)
        logp = mean_log_prob(g, x_next, free)
        storage = self.latents.storage
        after.stored = storage.put(x_next)
        x = storage.put(parents.x) if parents.stored is None else parents.stored
        stored_mean = storage.moved(mean) if self.keep_mean else None
        edges = Edges(k, x, after.stored, stored_mean, logp, self.prompt(x_next))
        if self.latents.layout is not None:
            by_part = mean_log_prob(g, x_next, free, self.latents.layout)
            edges = replace(edges, by_part=by_part)
        return after, edges

    def solve(self, plan: StepTree, index: int, k: int, at: State) -> State:
        """Take a step without a density."""
        if plan.stochastic(k):  # a solver that draws noise parts the states that share theirs
            at = at.children(plan.states[k + 1] // plan.states[k])
        point = self.point(plan, index, k, at)
        x, new = plan.solver_at(k)(point, at.past)
        x = self.rounded(plan, self.blended(plan, k, x.to(at.x.dtype), at.root))
        past = self.remember(plan, at, point, new) if plan.solver.memory else ()
        return State(x, past, root=at.root)

    def point(self, plan: StepTree, index: int, k: int, at: State) -> Point:
        assert at.v is not None
        step = plan.steps[k]
        noise = lambda: self.step_noise(plan, index, k)
        return Point(at.x, at.v, step.sigma, step.sigma_next, self.look, noise)

    def remember(
        self, plan: StepTree, at: State, point: Point, new: Past | None = None
    ) -> tuple[Past, ...]:
        return (new or point.past, *at.past)[: plan.solver.memory]

    def step_noise(self, plan: StepTree, index: int, k: int) -> Tensor:
        """Noise for the children of step k; siblings' noise is correlated if the plan has
        `split`."""
        index = index if plan.noise_of is None else plan.noise_of
        separate = self.noise(plan.states[k + 1], "step", index, k)
        branch = plan.steps[k].branch
        if plan.split is None or branch == 1:
            return separate
        common = self.noise(plan.states[k + 1] // branch, "split", index, k)
        common = common.repeat_interleave(branch, 0)
        return (common + plan.split * separate) / (1 + plan.split**2) ** 0.5


def of_children(times: int, values: Tensor) -> Tensor:
    """Values of states [n ...] for each of their children."""
    return values if times == 1 else derived(partial(_repeated, times), values)


def _repeated(times: int, values: Tensor) -> Tensor:
    return values.repeat_interleave(times, 0)


def level_of(x: Tensor, sigma: float) -> Float[Tensor, " n"]:
    """The level of every row, in float32 or better: bfloat16 would round it."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return filled_rows(len(x), sigma, dtype, x.device)
