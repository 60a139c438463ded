"""Samples with a higher reward from the same weights: search at inference time.

    best         the best of each draw's samples
    importance   samples drawn anew with weights exp(strength reward)
    steer        Feynman-Kac particles (arXiv:2501.06848): weighed and drawn anew on the way

All of them aim at p(x) exp(strength reward(x)); `best` is its limit. Weights are kept as logs, so
no reward is too large. A reward that is not finite says nothing on the way and weighs nothing at
the end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.noise import uniform
from samplers.plan import Plan
from samplers.walk import Velocity, Walk

# (clean samples [n *d], row of the conditioning of each [n]) -> reward [n]
Score = Callable[[Tensor, Tensor], Tensor]


def effective(log_weights: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """The effective sample size 1 / sum w^2 of normalised weights, from 1 to k."""
    return 1 / normalised(log_weights).square().sum(-1)


def normalised(log_weights: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
    """Weights that add to 1, float64; equal ones where nothing weighs anything (all -inf)."""
    none = (log_weights == -math.inf).all(-1, keepdim=True)
    return torch.where(none, 0.0, log_weights.double()).softmax(-1)


def systematic(
    log_weights: Float[Tensor, "n k"], u: Float[Tensor, " n"], count: int
) -> Int[Tensor, "n count"]:
    """`count` rising indices a row in proportion to its weights, from one number in [0, 1) a row.

    Index i comes floor or ceil of count w_i times, and count w_i times on average: less noise than
    independent draws, and the same target.
    """
    upto = normalised(log_weights).cumsum(-1)
    upto = upto / upto[:, -1:]
    places = (torch.arange(count, dtype=torch.float64) + u[:, None]) / count
    return torch.searchsorted(upto, places.to(upto), right=True).clamp_max(upto.shape[1] - 1)


def _flat(index: Int[Tensor, "n m"], group: int) -> Int[Tensor, " nm"]:
    """Indices within each draw's rows, as indices of all rows."""
    return (index + group * torch.arange(len(index), device=index.device)[:, None]).flatten()


def best(score: Float[Tensor, " n"], group: int, keep: int = 1) -> Int[Tensor, " m"]:
    """Rows of each draw's `keep` best samples, best first; unscored ones come last."""
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
    """Rows drawn with weights exp(strength score), `keep` a draw; a key for each draw."""
    group = len(score) // len(keys)
    known = torch.where(score.isfinite(), strength * score, -math.inf).cpu()
    index = systematic(known.view(-1, group), uniform([(*k, "importance") for k in keys]), keep)
    return _flat(index, group).to(score.device)


class Particles(NamedTuple):
    """What n draws' k particles carry: all [n k], float64."""

    reward: Tensor  # the last one, their highest or their sum, by the potential
    spent: Tensor  # log of all potentials that a particle's line was weighed with
    log_weight: Tensor  # of the potentials since it was last drawn anew

    def take(self, index: Int[Tensor, "n k"], drawn: Tensor) -> "Particles":
        """Draw anew in the rows where `drawn` [n 1]: weights are equal after it."""
        index = torch.where(drawn, index, torch.arange(index.shape[1], device=index.device))
        reward, spent, log_weight = (a.gather(1, index) for a in self)
        return Particles(reward, spent, torch.where(drawn, 0.0, log_weight))


@dataclass(frozen=True)
class FeynmanKac:
    """When particles are weighed, and by what.

    Before each step of `at`, the potential of the reward r of the predicted clean sample is

        difference   exp(strength (r - r before))          max   exp(strength max of r so far)
        terminal     exp(strength r)                       sum   exp(strength sum of r so far)

    and at the end exp(strength r) of the clean sample itself, over what was spent: whatever the
    potentials, a line's product is exp(strength r(x0)). (For max and sum the published code ends
    on the highest and the sum; `ends_on="potential"` does so.) `start` is r before the first: 0 as
    published, which is wrong for max with negative rewards, so None takes the first r.
    `adaptive` draws anew only where the effective sample size is below `threshold` of the
    particles. Weights that were not used are kept for the next time; the published code drops them
    and then misses its target with "difference".
    """

    at: tuple[int, ...]
    strength: float = 10.0
    potential: Literal["difference", "max", "sum", "terminal"] = "max"
    ends_on: Literal["reward", "potential"] = "reward"
    start: float | None = None
    adaptive: bool = True
    threshold: float = 0.5

    def begin(self, draws: int, particles: int) -> Particles:
        zero = torch.zeros(draws, particles, dtype=torch.float64)
        start = self.start
        if start is None:
            start = -math.inf if self.potential == "max" else 0.0
        return Particles(zero + start, zero, zero)

    def weigh(
        self, before: Particles, score: Float[Tensor, "n k"], last: bool = False
    ) -> Particles:
        """The particles after one more reward."""
        scored = score.isfinite()
        r = torch.where(scored, score.double(), before.reward)
        running = {
            "difference": r,
            "terminal": r,
            "max": torch.maximum(r, before.reward),
            "sum": torch.where(scored, r + before.reward, r),
        }[self.potential]
        if last:
            origin = self.start if self.start and self.potential == "difference" else 0.0
            ends = r if self.ends_on == "reward" else running
            log_g = self.strength * (ends - origin) - before.spent
            log_g = torch.where(scored, log_g, -math.inf)
        else:
            change = before.reward if self.potential == "difference" else 0.0
            log_g = torch.where(scored, self.strength * (running - change), 0.0)
        return Particles(running, before.spent + log_g, before.log_weight + log_g)

    def draw(
        self, particles: Particles, keys: Sequence[tuple[int | str, ...]]
    ) -> tuple[Int[Tensor, "n k"], Particles]:
        """(parent of each particle, the particles); a key for each draw."""
        n, k = particles.log_weight.shape
        few = effective(particles.log_weight) < self.threshold * k
        drawn = (few | (not self.adaptive))[:, None]
        index = systematic(particles.log_weight, uniform(keys), k)
        kept = torch.arange(k).expand(n, k)
        return torch.where(drawn, index, kept), particles.take(index, drawn)


@dataclass(frozen=True)
class Steered:
    """Particles of one draw are contiguous, as a rollout's leaves are."""

    x0: Float[Tensor, "n *d"]
    prompt: Int[Tensor, " n"]
    weight: Float[Tensor, " n"]  # adds to 1 over a draw: what the last weighing left unused
    parents: tuple[Int[Tensor, "draws k"], ...]  # at each weighing: who a particle goes on from


@torch.no_grad()
def steer(  # noqa: PLR0913 the settings behind the star are one call's, by name
    how: FeynmanKac,
    plan: Plan,
    velocity: Velocity,
    score: Score,
    shape: tuple[int, ...],
    draws: Sequence[int],
    *,
    seed: int,
    iteration: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Steered:
    """Run a plan's group as particles. No network evaluation more than `roll` needs.

    Copies part at the next noisy step: steer a plan that has some after the steps of `how.at`.
    """
    if any(nodes != plan.roots for nodes in plan.nodes) or plan.states[0] != plan.roots:
        raise ValueError("particles are a plan's roots, each with its own noise, without branches")
    if wrong := [k for k in how.at if not 0 <= k < len(plan.steps)]:
        raise ValueError(f"steps {wrong} are not among the steps 0 to {len(plan.steps) - 1}")
    like = torch.empty(0, device=device, dtype=dtype)
    walk = Walk(velocity, tuple(shape), tuple(draws), (seed, iteration), like)
    particles, parents = how.begin(len(draws), plan.roots), []

    def weigh(x0: Tensor, k: int, last: bool = False) -> Tensor:
        nonlocal particles
        r = score(x0, walk.prompt(x0)).view(len(draws), -1).cpu()
        keys = [(seed, iteration, draw, "resample", k) for draw in draws]
        index, particles = how.draw(how.weigh(particles, r, last), keys)
        parents.append(index)
        return _flat(index, plan.roots).to(x0.device)

    state = walk.root(plan)
    for k, step in enumerate(plan.steps):
        if k in how.at:
            state.v = walk.look(state.x, step.sigma)
            state = state.rows(weigh(state.x - step.sigma * state.v, k))
        state, _ = walk.advance(plan, 0, k, state)
    x0 = state.x[weigh(state.x, len(plan.steps), last=True)]
    weight = normalised(particles.log_weight).flatten()
    return Steered(x0, walk.prompt(x0), weight, tuple(parents))
