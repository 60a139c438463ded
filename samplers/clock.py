"""States whose parts are at different noise levels in one step: blocks of frames that are denoised
one after the other, or in a wave.

A loop of such a model takes steps that each move some parts of the state, from levels of their own
to their next ones, and leave the others. A **clock** makes one list of levels of it: the state's
level before a step is the mean of its parts' levels, weighted by their sizes. It falls from 1 to 0,
and is the parts' own level where all of them move together. Plans, trees and stores see this one
list; the state has all parts, those that are clean and those that are still noise, so that a branch
copies them and a replay has what a part's density is conditioned on.

The velocity of such a state is d x / d clock: (s - s') / (c - c') times the own velocity noise - x0
of a part that goes from s to s' while the clock goes from c to c', and 0 for a part that rests. So
Euler's step of the state is Euler's step of each part. A kernel is taken part by part, at the
part's own levels (`Clocked`).

The density of a sample is the product over steps of p(the parts that move, after the step | the
whole state before it). A part that rests has no density there, and neither has one whose step ends
at the data: as in a plan's last step, it is Euler's.

Shapes: n rows; `x` and `v` are flat, [n d]; levels are the clock's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from samplers.host import on_host, uploaded
from samplers.kernels import AnyLevels, Gaussian, Kernel, euler, lift
from samplers.plan import Plan
from samplers.planners import CLEAN
from samplers.route import PlainRoute
from samplers.solvers import Euler
from samplers.untyped import split_columns

SOME_LEVEL, LOWER_LEVEL = 0.5, 0.25  # of a kernel's step whose result is not used


class Move(NamedTuple):
    """Own levels [n p] of parts before and after a step of each row, and the clock's fall [n 1]."""

    at: Float[Tensor, "n p"]
    to: Float[Tensor, "n p"]
    fall: Float[Tensor, "n 1"]

    @property
    def moves(self) -> Bool[Tensor, "n p"]:
        return self.at > self.to

    @property
    def drawn(self) -> Bool[Tensor, "n p"]:
        """The parts that a noisy step draws: those that move, and do not end at the data."""
        return self.moves & (self.to >= CLEAN)

    @property
    def slope(self) -> Float[Tensor, "n p"]:
        """The fall of a part's own level as a share of the clock's; 0 for a part that rests."""
        return (self.at - self.to) / self.fall


@dataclass(frozen=True)
class PartClock:
    """Own levels of each part before each step, and at the end: `levels` [steps + 1][parts].

    `sizes` are the numbers of entries of the parts, in the state's order. ValueError for levels
    that do not fall from at most 1 to 0, and for a step in which no part moves.
    """

    sizes: tuple[int, ...]
    levels: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(self.sizes) for row in self.levels):
            raise ValueError(f"a clock of {len(self.sizes)} parts needs a level of each: {self}")
        if max(self.levels[0]) > 1 or any(self.levels[-1]):
            raise ValueError(
                f"levels of parts must go from at most 1 to 0, but go from {self.levels[0]} to "
                f"{self.levels[-1]}"
            )
        for k, (before, after) in enumerate(pairwise(self.levels)):
            if before == after or any(a < b for a, b in zip(before, after, strict=True)):
                raise ValueError(
                    f"step {k}: a part must move down, and no part up, but levels go from "
                    f"{before} to {after}"
                )

    @cached_property
    def sigmas(self) -> tuple[float, ...]:
        """The clock's levels."""
        whole = sum(self.sizes)
        return tuple(
            row[0]
            if len(set(row)) == 1
            else sum(size * level for size, level in zip(self.sizes, row, strict=True)) / whole
            for row in self.levels
        )

    def draws(self, step: int) -> bool:
        """Whether a noisy step draws any part."""
        pairs = zip(self.levels[step], self.levels[step + 1], strict=True)
        return any(at > to >= CLEAN for at, to in pairs)

    @property
    def moved(self) -> str:
        """The way in which the parts move, in words."""
        counts = {
            sum(at > to for at, to in zip(*ends, strict=True)) for ends in pairwise(self.levels)
        }
        if counts == {len(self.sizes)}:
            return "moved together"
        return "moved one after the other" if counts == {1} else "moved in a wave"

    @property
    def even(self) -> bool:
        """Whether the parts that a step moves have the same own levels, in every step."""
        return all(
            len({pair for pair in zip(*ends, strict=True) if pair[0] > pair[1]}) == 1
            for ends in pairwise(self.levels)
        )

    def index(self, sigma: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
        """The step of each of the clock's levels, on the CPU."""
        asked = on_host(sigma).double()
        return (asked[:, None] - torch.tensor(self.sigmas[:-1]).double()).abs().argmin(1)

    def move(self, sigma: Float[Tensor, " n"]) -> Move:
        """The steps that begin at these levels, in their dtype and on their device."""
        step = self.index(sigma)
        levels, clock = torch.tensor(self.levels).double(), torch.tensor(self.sigmas).double()
        at, to = levels[step], levels[step + 1]
        fall = (clock[step] - clock[step + 1])[:, None]
        dtype = lift(sigma).dtype
        return Move(*(uploaded(of.to(dtype), sigma.device) for of in (at, to, fall)))

    def entries(self, of_parts: Tensor) -> Tensor:
        """A number for each entry [n d] from one of each part [n p]."""
        sizes = torch.tensor(self.sizes, device=of_parts.device)
        return of_parts.repeat_interleave(sizes, 1, output_size=sum(self.sizes))

    def velocity(self, v: Float[Tensor, "n d"], sigma: Float[Tensor, " n"]) -> Tensor:
        """The state's velocity d x / d clock, from the parts' own; those at rest have 0."""
        return self.entries(self.move(sigma.to(v.device)).slope).to(lift(v)) * lift(v)

    def own_velocity(self, v: Float[Tensor, "n d"], sigma: Float[Tensor, " n"]) -> Tensor:
        """Inverse of `velocity`; 0 for parts at rest."""
        slope = self.entries(self.move(sigma.to(v.device)).slope).to(lift(v))
        return torch.where(slope > 0, lift(v) / slope.clamp(min=1e-12), 0.0)


@dataclass(frozen=True)
class Clocked:
    """A kernel that takes the step of each part at the part's own levels.

    Formula: for a part that moves from s to s' > 0, the kernel's own with v (c - c') / (s - s'),
    for clock levels c to c'; Euler's for one that moves to the data; x for one that rests

    The std is a number per entry [n d], and 0 where there is no noise. For states of one entry a
    row, by which a plan asks for the size of its steps, mean and std are means over the entries
    that are drawn.
    """

    kernel: Kernel
    clock: PartClock

    affine = False  # its numbers are those of entries, not of rows
    by_settings = False  # no setting has a model's clock

    def __call__(
        self,
        x: Float[Tensor, "n *d"],
        v: Float[Tensor, "n *d"],
        sigma: Float[Tensor, "n *e"],
        sigma_next: Float[Tensor, "n *e"],
    ) -> Gaussian:
        del sigma_next  # the clock's next level
        sizes, levels = self.clock.sizes, sigma.flatten()
        asked = x[0].numel() == 1 and sum(sizes) > 1
        states = [lift(x).flatten(1)] * len(sizes) if asked else split_columns(lift(x), sizes)
        velocities = self.clock.own_velocity(
            v.flatten(1).expand(-1, sum(sizes)) if asked else v, levels
        )
        move, means, stds = self.clock.move(levels), list[Tensor](), list[Tensor]()
        for part, velocity in enumerate(split_columns(velocities, sizes)):
            velocity = velocity[:, :1] if asked else velocity
            mean, std = self._part(states[part], velocity, move, part)
            means.append(mean)
            stds.append(std[:, None].expand_as(mean))
        if not asked:
            return Gaussian(torch.cat(means, 1), torch.cat(stds, 1))
        weights = move.drawn * torch.tensor(sizes).to(move.at)
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
        mean, std = ((torch.cat(of, 1) * weights).sum(1) for of in (means, stds))
        return Gaussian(mean.reshape(x.shape), std.reshape(sigma.shape))

    def _part(self, x: Tensor, v: Tensor, move: Move, part: int) -> Gaussian:
        """The step of one part [n e], from its own velocity, which is 0 at rest."""
        moves, drawn = move.moves[:, part], move.drawn[:, part]
        at = torch.where(moves, move.at[:, part], SOME_LEVEL)
        to = torch.where(moves, move.to[:, part], LOWER_LEVEL)
        noisy = self.kernel(x, v, at, torch.where(drawn, to, at / 2))
        mean = torch.where(drawn[:, None], noisy.mean, euler(x, v, at, to))
        return Gaussian(mean, torch.where(drawn, noisy.std, torch.zeros_like(noisy.std)))

    def bound(self, sigmas: Sequence[float]) -> "Clocked":
        """The kernel itself. ValueError for other levels than the clock's."""
        if tuple(sigmas) != self.clock.sigmas:
            raise ValueError(
                "parts of this model's states have levels of their own, so a plan has the model's "
                "levels alone: leave out what changes them (such as flash)"
            )
        return self

    def drawn(self, sigma: Float[Tensor, " n"]) -> Bool[Tensor, "n d"]:
        """The entries that a noisy step draws: the others have no density."""
        return self.clock.entries(self.clock.move(sigma).drawn)

    def scales(self, sigma: Float[Tensor, " n"]) -> "EntryScales":
        """The numbers of the step for each entry; those of entries that are not drawn have no
        meaning."""
        move, stds, slopes = self.clock.move(sigma), list[Tensor](), list[Tensor]()
        zero = torch.zeros_like(move.fall)
        for part in range(len(self.clock.sizes)):
            drawn = move.drawn[:, part]
            at = torch.where(drawn, move.at[:, part], SOME_LEVEL)
            to = torch.where(drawn, move.to[:, part], LOWER_LEVEL)
            mean, std = self.kernel(zero, zero + 1, at, to)
            stds.append(std[:, None])
            slopes.append(mean)
        fall = move.at - move.to
        return EntryScales(
            *(self.clock.entries(of) for of in (*(torch.cat(o, 1) for o in (stds, slopes)), fall))
        )


class EntryScales(NamedTuple):
    """Std of a step, d mean / d own velocity, and the fall of the own level, by entry [n d]."""

    std: Float[Tensor, "n d"]
    slope: Float[Tensor, "n d"]
    fall: Float[Tensor, "n d"]


def on_clock(plan: Plan, clock: PartClock) -> Plan:
    """The plan with its kernel taken part by part, for a model whose parts have these levels.

    A noisy step that draws no part, since the parts that it moves end at the data, becomes a step
    without noise; where it was trained on, the last step before it that draws is. ValueError for a
    plan that needs one level for all of the state, and for one that branches at such a step.
    """
    if plan.sigmas != clock.sigmas:
        raise ValueError(
            "it has other levels than the model's (such as those of flash), at which the model's "
            "parts have none"
        )
    if plan.solver != Euler():
        raise ValueError(
            f"its solver {plan.solver} reads one level for all parts: set solver: euler"
        )
    if plan.route != PlainRoute():
        raise ValueError(
            "it looks at samples in the middle, or moves them, and that needs one level for all "
            "parts: leave out what steers, scores or thins them there"
        )
    if plan.kernel is None:
        return plan
    if not isinstance(plan.kernel, AnyLevels):
        raise ValueError(
            f"{plan.kernel} has numbers of one list of levels: use another kernel, such as "
            "flow_sde, constant_sde or cps"
        )
    steps = list(plan.steps)
    for k, step in enumerate(plan.steps):
        if not step.noisy or clock.draws(k):
            continue
        if step.branch > 1:
            able = [j for j in range(len(steps)) if clock.draws(j)]
            raise ValueError(
                f"step {k} ends a part of the state, so it draws no noise and cannot branch: the "
                f"steps {able} can"
            )
        steps[k] = replace(step, noisy=False, train=False)
        before = [j for j in range(k) if clock.draws(j)]
        if step.train and before:
            steps[before[-1]] = replace(steps[before[-1]], noisy=True, train=True)
    return replace(plan, steps=tuple(steps), kernel=Clocked(plan.kernel, clock))
