"""Take one step of a plan at a time: the core of `roll` and `steering`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.held import Held
from samplers.host import derived, filled_rows, on_device, sent
from samplers.kernels import Gaussian, euler, mean_log_prob, per_row
from samplers.kernels import step as kernel_step
from samplers.layout import Layout
from samplers.looks import Seen
from samplers.noise import NoiseKind, keyed_noise
from samplers.plan import Plan
from samplers.solvers import Past, Point
from samplers.storage import Storage

# (x [n *d], sigma [n], row of the conditioning of each x [n]) -> v [n *d]
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
# (noise [n *d], row of the conditioning of each [n]) -> the first states [n *d]
Begin = Callable[[Tensor, Tensor], Tensor]

# (plan, its place, clean samples [n *d], row of the conditioning of each [n]) -> rewards [n]
Predicted = Callable[[Plan, int, Tensor, Tensor], Tensor]


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
    moved: Float[Tensor, " c"] | None = None  # a guide's move of the mean, in stds per dim
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
    reward: Predicted | None = None  # of predicted clean samples
    slope: Predicted | None = None  # of that reward in the clean samples [n *d]
    aside: Callable[[], AbstractContextManager[None]] | None = None  # around untrained steps

    def prompt(self, x: Tensor) -> Int[Tensor, " n"]:
        rows = torch.arange(len(self.draws)).repeat_interleave(len(x) // len(self.draws))
        return sent(rows, x.device)

    def look(self, x: Tensor, sigma: float) -> Tensor:
        return self.velocity(x, _level(x, sigma), self.prompt(x))

    def noise(self, nodes: int, *purpose: int | str) -> Tensor:
        """Standard normal noise for `nodes` nodes of each draw."""
        keys = [(*self.key, draw, *purpose, node) for draw in self.draws for node in range(nodes)]
        of = self.latents
        return keyed_noise(of.noise, keys, of.shape, of.dtype, of.device, of.layout)

    def root(self, plan: Plan) -> State:
        """The initial state: noise, or `begin` applied to it. All plans of an iteration start from
        it."""
        x, begin = self.noise(plan.states[0], "root"), self.latents.begin
        x = x if begin is None else begin(x, self.prompt(x)).to(x.dtype)
        return State(self.rounded(plan, x), root=None if self.latents.held is None else x)

    def blended(self, plan: Plan, k: int, x: Tensor, root: Tensor | None) -> Tensor:
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

    def rounded(self, plan: Plan, x: Tensor) -> Tensor:
        """The state from which the sampler continues if states are rounded for storage."""
        if self.latents.storage.dtype is None:
            return x
        trained = any(step.train for step in plan.steps)
        return self.latents.storage.rounded(x) if trained else x

    def advance(self, plan: Plan, index: int, k: int, at: State) -> tuple[State, Edges | None]:
        """Take step k: the next states, and the transitions if they are trained on."""
        if self.aside is None or plan.steps[k].train:
            return self.step(plan, index, k, at)
        known = at.v
        with self.aside():
            after = self.step(plan, index, k, at)
        at.v = known  # another plan may train on this state, and evaluates it by itself
        return after

    def step(self, plan: Plan, index: int, k: int, at: State) -> tuple[State, Edges | None]:
        if at.v is None:
            at.v = self.look(at.x, plan.steps[k].sigma)
        if plan.steps[k].noisy:
            return self.draw(plan, index, k, at)
        return self.solve(plan, index, k, at), None

    def draw(self, plan: Plan, index: int, k: int, at: State) -> tuple[State, Edges | None]:
        """Take a noisy step, in which every state gets its children."""
        step, kernel = plan.steps[k], plan.kernel
        assert kernel is not None and at.v is not None  # Plan.__post_init__; advance
        times = plan.states[k + 1] // plan.states[k]
        sigma, sigma_next = _level(at.x, step.sigma), _level(at.x, step.sigma_next)
        mean, std = kernel_step(kernel, at.x, at.v, sigma, sigma_next)
        guided = plan.guide is not None and plan.guided(k)
        pushed = self.push(plan, index, k, at, Gaussian(mean, std)) if guided else mean
        parents = at.children(times)
        if times > 1:
            both = mean, std, pushed
            mean, std, pushed = (derived(partial(_repeated, times), a) for a in both)
        g = Gaussian(mean, std)
        x_next = (pushed + per_row(std, mean) * self.step_noise(plan, index, k)).to(at.x.dtype)
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
        kept = storage.moved(mean) if self.keep_mean else None
        edges = Edges(k, x, after.stored, kept, logp, self.prompt(x_next))
        if self.latents.layout is not None:
            each = mean_log_prob(g, x_next, free, self.latents.layout)
            edges = replace(edges, by_part=each)
        if guided:
            edges = replace(edges, moved=(pushed - mean).flatten(1).square().mean(1).sqrt() / std)
        return after, edges

    def push(self, plan: Plan, index: int, k: int, at: State, plain: Gaussian) -> Tensor:
        """Shifted means of the kernel, from which a guided step samples."""
        assert plan.guide is not None  # draw
        levels = (_level(at.x, s) for s in (plan.steps[k].sigma, plan.steps[k].sigma_next))
        by = self.slopes if plan.guide.by == "slope" else self.probes
        return plan.guide.drift(plain, by(plan, index, k, at, plain.mean), *levels).mean

    def slopes(self, plan: Plan, index: int, k: int, at: State, mean: Tensor) -> Tensor:
        """Reward gradients at the predicted clean samples; 0 for samples without a score."""
        if self.slope is None:
            raise ValueError(
                "a plan with gradient guidance needs reward gradients: pass Sampling(slope=...)"
            )
        assert at.v is not None
        x0 = at.x - plan.steps[k].sigma * at.v
        return self.slope(plan, index, x0, self.prompt(x0)).to(mean).nan_to_num(0.0)

    def probes(self, plan: Plan, index: int, k: int, at: State, mean: Tensor) -> Tensor:
        """Estimated reward gradients at the states; 0 for states without a score."""
        if self.reward is None:
            raise ValueError("a guided plan needs an intermediate reward: pass Sampling(score=...)")
        assert plan.guide is not None
        sigma, probe = plan.steps[k].sigma, plan.guide.probe
        u = self.noise(plan.states[k], "probe", index, k).sign()
        ends: list[Tensor] = []
        for x in (at.x + probe * u, at.x - probe * u):
            x0 = x - sigma * self.look(x, sigma)
            ends.append(self.reward(plan, index, x0, self.prompt(x0)).to(mean))
        change = ((ends[0] - ends[1]) / (2 * probe)).nan_to_num(0.0)
        return per_row(change, u) * u.to(mean)

    def solve(self, plan: Plan, index: int, k: int, at: State) -> State:
        """Take a step without a density."""
        if plan.stochastic(k):  # a solver that draws noise parts the states that share theirs
            at = at.children(plan.states[k + 1] // plan.states[k])
        point = self.point(plan, index, k, at)
        x, new = plan.solver_at(k)(point, at.past)
        x = self.rounded(plan, self.blended(plan, k, x.to(at.x.dtype), at.root))
        past = self.remember(plan, at, point, new) if plan.solver.memory else ()
        return State(x, past, root=at.root)

    def completed(self, plan: Plan, k: int, at: State) -> Seen:
        """Predict the clean samples of the states before step k with the plan's ODE."""
        assert plan.looks is not None
        if at.v is None:
            at.v = self.look(at.x, plan.steps[k].sigma)
        x, v = at.x, at.v
        for sigma, sigma_next in pairwise(plan.looks.levels(plan.sigmas, k)):
            v = self.look(x, sigma) if v is None else v
            x = euler(x, v, _level(x, sigma), _level(x, sigma_next)).to(at.x.dtype)
            v = None
        x = self.blended(plan, len(plan.steps) - 1, x, at.root)
        return Seen(k, x, self.prompt(x))

    def point(self, plan: Plan, index: int, k: int, at: State) -> Point:
        assert at.v is not None
        step = plan.steps[k]
        noise = lambda: self.step_noise(plan, index, k)
        return Point(at.x, at.v, step.sigma, step.sigma_next, self.look, noise)

    def remember(
        self, plan: Plan, at: State, point: Point, new: Past | None = None
    ) -> tuple[Past, ...]:
        return (new or point.past, *at.past)[: plan.solver.memory]

    def step_noise(self, plan: Plan, index: int, k: int) -> Tensor:
        """Noise for the children of step k; siblings' noise is correlated if the plan has
        `split`."""
        index = index if plan.noise_of is None else plan.noise_of
        own = self.noise(plan.states[k + 1], "step", index, k)
        branch = plan.steps[k].branch
        if plan.split is None or branch == 1:
            return own
        common = self.noise(plan.states[k + 1] // branch, "split", index, k)
        common = common.repeat_interleave(branch, 0)
        return (common + plan.split * own) / (1 + plan.split**2) ** 0.5


def _repeated(times: int, values: Tensor) -> Tensor:
    return values.repeat_interleave(times, 0)


def _level(x: Tensor, sigma: float) -> Float[Tensor, " n"]:
    """The level of every row, in float32 or better: bfloat16 would round it."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return filled_rows(len(x), sigma, dtype, x.device)
