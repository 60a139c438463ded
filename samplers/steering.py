"""Samples with a higher reward from the same weights: search at inference time.

    best         the best of each draw's samples
    importance   samples resampled with weights exp(strength reward)
    steer        Feynman-Kac particles (samplers/particles.py): weighted and resampled during
                 sampling

All of them target p(x) exp(strength reward(x)); `best` is its limit. A plan with `steer` feeds
training with particles: see `Particled` in samplers/planners.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from samplers.host import sent
from samplers.noise import uniform
from samplers.particles import FeynmanKac, Particles, ParticleScore, normalised, systematic
from samplers.plan import Plan
from samplers.walk import Latents, Velocity, Walk


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
    known = torch.where(score.isfinite(), strength * score, -math.inf).cpu()
    index = systematic(known.view(-1, group), uniform([(*k, "importance") for k in keys]), keep)
    return sent(_flat(index, group), score.device)


@dataclass(frozen=True)
class Steered:
    """Result of steering; the particles of a draw are contiguous, like a rollout's leaves."""

    x0: Float[Tensor, "n *d"]
    prompt: Int[Tensor, " n"]
    weight: Float[Tensor, " n"]  # adds to 1 over a draw: what the last weighing left unused
    parents: tuple[Int[Tensor, "draws k"], ...]  # at each weighing: the parent of each particle


@dataclass(frozen=True)
class Steering:
    """Particle steering along a plan. `index` is the plan's index in its iteration."""

    how: FeynmanKac
    walk: Walk
    plan: Plan
    index: int
    score: ParticleScore

    def __post_init__(self) -> None:
        plan, steps = self.plan, len(self.plan.steps)
        if any(nodes != plan.roots for nodes in plan.nodes) or plan.states[0] != plan.roots:
            raise ValueError(
                "particles must be the roots of a plan without branches, each with its own noise"
            )
        if wrong := [k for k in self.how.at if not 0 <= k < steps]:
            raise ValueError(f"steps {wrong} are out of range, the steps are 0 to {steps - 1}")

    def weigh(
        self, particles: Particles, x0: Tensor, k: int, last: bool = False
    ) -> tuple[Int[Tensor, "draws m"], Particles]:
        """Resample by the reward of `x0`. Returns (the parent of each particle, the particles)."""
        (seed, iteration), draws = self.walk.key, self.walk.draws
        r = self.score(x0, self.walk.prompt(x0)).view(len(draws), -1).cpu()
        keys = [(seed, iteration, draw, "resample", k) for draw in draws]
        return self.how.draw(self.how.weigh(particles, r, last), keys)

    def descend(self) -> tuple[Tensor, Particles, list[Tensor]]:
        """Sample and return (clean samples, particles, parents), before the final weighting."""
        walk, plan = self.walk, self.plan
        particles, parents = self.how.begin(len(walk.draws), plan.roots), list[Tensor]()
        state = walk.root(plan)
        for k, step in enumerate(plan.steps):
            if k in self.how.at:
                state.v = walk.look(state.x, step.sigma)
                index, particles = self.weigh(particles, state.x - step.sigma * state.v, k)
                state = state.rows(sent(_flat(index, plan.roots), state.x.device))
                parents.append(index)
            state, _ = walk.advance(plan, self.index, k, state)
        return state.x, particles, parents


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
    walk = Walk(velocity, latents, tuple(draws), (seed, iteration))
    way = Steering(how, walk, plan, 0, score)
    x0, particles, parents = way.descend()
    index, particles = way.weigh(particles, x0, len(plan.steps), last=True)
    x0 = x0[sent(_flat(index, plan.roots), x0.device)]
    weight = normalised(particles.log_weight).flatten()
    return Steered(x0, walk.prompt(x0), weight, (*parents, index))
