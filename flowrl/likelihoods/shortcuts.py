"""Gradients from states that a plan kept.

`Kept` takes the steps from one of them again. `Shortcuts` leaves the sample of a finished
trajectory unchanged, and adds velocities at some of its states: LeapAlign (arXiv:2604.15311) and
FlowBP (arXiv:2606.11075).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from numpy.polynomial import polynomial
from torch import Tensor

from flowrl.credit.choices import Choices, image_plans
from flowrl.likelihoods.pathwise import Path, PathRows
from flowrl.likelihoods.rows import Rows
from flowrl.number_checks import check_number
from samplers import Plan, Rollout, Velocity
from samplers.host import filled_rows
from samplers.number_ranges import AT_LEAST_0, AT_LEAST_1, FROM_0_TO_1, POSITIVE
from samplers.routes.keeping import bridge_of, kept_states, kept_steps
from samplers.routes.tails import TwoLeaps, evenly_spaced
from samplers.untyped import evaluated_again


@dataclass(frozen=True, kw_only=True)
class ShortcutRows(PathRows):
    """States `x` [b m *e] that samples `x0` passed at the first m of `sigmas`, the last of which
    is 0.

    weights  of the m velocities in the sample
    scales   of their gradients
    bridge   the state whose gradient reaches the velocities before it, times `alpha`
    tau      smallest distance that counts in the weight of a sample; None: all weigh the same
    rest     parts of the two connections [b 2 *e] from velocities without gradients
    """

    x0: Float[Tensor, "b *e"]
    weights: tuple[float, ...]
    scales: tuple[float, ...]
    bridge: int | None = None
    alpha: float = 0.0
    tau: float | None = None
    rest: Float[Tensor, "b 2 *e"] | None = None

    def known_states(self) -> list[Tensor]:
        return list(self.x.unbind(1))

    def path(self, policy: Velocity) -> Path:
        """The samples `x0`, whose gradient is that of sum scale weight v(x, sigma)."""
        again = torch.is_grad_enabled() and len(self.weights) > 1
        states, velocities = self.known_states(), list[Tensor]()
        shift = torch.zeros_like(self.x0)  # 0, with the gradient
        for k, (x, weight, scale) in enumerate(zip(states, self.weights, self.scales, strict=True)):
            if k == self.bridge and self.alpha:
                x = x + self.alpha * shift
            dtype = torch.promote_types(x.dtype, torch.float32)
            level = filled_rows(len(x), self.sigmas[k], dtype, x.device)
            v = (
                evaluated_again(policy, x, level, self.prompt)
                if again
                else policy(x, level, self.prompt)
            )
            velocities.append(v)
            shift = (shift + scale * weight * (v - v.detach())).to(self.x0.dtype)
        return Path(self.x0 + shift, states, velocities, self._similarity(velocities))

    @torch.no_grad()
    def _similarity(self, velocities: Sequence[Tensor]) -> Float[Tensor, "b 1"] | None:
        """Weights 1 / (max(d_bridge, tau) + max(d_0, tau)), where d is the mean absolute distance
        from a connection to the state of the trajectory (LeapAlign, eq. 12)."""
        if self.tau is None:
            return None
        assert self.bridge is not None
        ends = ((0, self.bridge), (self.bridge, len(self.weights)))
        targets = (self.x[:, self.bridge], self.x0)
        distances: list[Tensor] = []
        for leap, ((start, end), target) in enumerate(zip(ends, targets, strict=True)):
            endpoint = (
                self.x[:, start] if self.rest is None else self.x[:, start] + self.rest[:, leap]
            )
            for k in range(start, end):
                endpoint = endpoint + self.weights[k] * velocities[k].detach()
            distance = (endpoint - target).abs().flatten(1).mean(1, keepdim=True)
            distances.append(distance.clamp(min=self.tau))
        return 1 / (distances[0] + distances[1])


@dataclass(frozen=True)
class Kept:
    """Starts from the states that the plan kept and takes all remaining steps (DRaFT-K,
    arXiv:2309.17400), or one step to the clean sample (`project`: ReFL, arXiv:2304.05977).

    project  whether one step leads to the clean sample; else all remaining steps are taken
    """

    project: bool = False
    inside = True

    def refuses(self, choices: Choices) -> str | None:
        if any(len(kept_steps(plan)) != 1 for plan in image_plans(choices)):
            return "Kept needs stored intermediate states: use the plan LastSteps or OneOfSteps"
        return None

    def steps(self, plan: Plan) -> list[int]:
        return [1 if self.project else len(plan.steps) - kept_steps(plan)[0]]

    def rows(self, rollout: Rollout, common: Rows) -> list[PathRows]:
        ((first, x),) = kept_states(rollout).items()
        levels = rollout.plan.sigmas[first:]
        sigmas = (levels[0], 0.0) if self.project else levels
        return [PathRows(**vars(common), x=x, sigmas=sigmas)]


class GradedStep(NamedTuple):
    """A step whose velocity has a gradient: its weight in the sample, and the scale of the
    gradient."""

    step: int
    weight: float
    scale: float


class Quadrature(NamedTuple):
    """A sum of velocities that stands for a part of the trajectory."""

    steps: list[int]
    weights: list[float]


def lagrange(levels: Sequence[float], start: int, end: int, order: int) -> Quadrature:
    """Integral of the polynomial through the velocities at `order` steps of [start, end).

        w_i = int_{sigma_start}^{sigma_end} prod_{q != i} (s - sigma_q) / (sigma_i - sigma_q) ds

    Order 1 is one leap with the velocity of its start, w = sigma_end - sigma_start.
    """
    steps = evenly_spaced(start, end, order)
    weights: list[float] = []
    for step in steps:
        other_levels = [levels[q] for q in steps if q != step]
        integral = polynomial.polyint(polynomial.polyfromroots(other_levels))
        scale = polynomial.polyval(levels[step], polynomial.polyfromroots(other_levels))
        ends = polynomial.polyval([levels[start], levels[end]], integral)
        weights.append(float((ends[1] - ends[0]) / scale))
    return Quadrature(steps, weights)


def rescaled(part: Sequence[float], whole: Sequence[float], share: float) -> float:
    """Factor 1 + share (sum |whole| / sum |part| - 1) on gradients, which makes up for the
    velocities that have none."""
    return 1 + share * (sum(map(abs, whole)) / sum(map(abs, part)) - 1)


@dataclass(frozen=True)
class Shortcuts:
    """Starts from the states that the plan kept, without a new trajectory.

        x0 = x0_sampled + sum_i g_i w_i (v_i - sg(v_i))

    sg stops the gradient. w_i are the steps' own lengths (`euler`: FlowBP-Sparse, and FlowBP-Bridge
    with a plan that has a bridge), or those of `lagrange` on the two leaps of the plan `TwoLeaps`
    (order 1: LeapAlign). The gradient also passes through the state at the bridge, times `alpha`.

    order    velocities per leap of `lagrange`, at least 1; the first two have gradients
    second   scale of the gradient of the second of them, at least 0
    rescale  how far gradients make up for velocities without, at least 0: 1 makes up for all
    tau      distance in LeapAlign's weight of samples, above 0; None: equal weights

    rule   lengths of the steps: the steps' own (`euler`), or those of two leaps (`lagrange`)
    alpha  share of the gradient that passes through the state at the bridge, in [0, 1]
    """

    rule: Literal["euler", "lagrange"]
    order: int = 1
    alpha: float = 0.0
    tau: float | None = None
    second: float = 1.0
    rescale: float = 0.0
    inside = False

    def __post_init__(self) -> None:
        check_number("Shortcuts's order", self.order, AT_LEAST_1)
        check_number("Shortcuts's alpha", self.alpha, FROM_0_TO_1)
        check_number("Shortcuts's tau", self.tau, POSITIVE)
        check_number("Shortcuts's second", self.second, AT_LEAST_0)
        check_number("Shortcuts's rescale", self.rescale, AT_LEAST_0)

    def refuses(self, choices: Choices) -> str | None:
        """Refuses plans that keep other states, and settings that need others."""
        plans, leaps = image_plans(choices), self.rule == "lagrange"
        if not all(map(kept_steps, plans)):
            return "Shortcuts needs stored intermediate states: use the plan TwoLeaps or SomeSteps"
        if leaps and not (isinstance(choices.plan, TwoLeaps) and choices.plan.order == self.order):
            return f"leaps of order {self.order} need the plan TwoLeaps with the same order"
        if self.alpha and any(bridge_of(plan) is None for plan in plans):
            return "alpha scales the gradient through a bridge, which this plan has not: set split"
        if self.tau is not None and not leaps:
            return (
                "tau is a distance between the ends of two leaps and the trajectory: leave it out, "
                "or use the rule lagrange"
            )
        return None

    def _leaps(self, plan: Plan) -> tuple[Quadrature, Quadrature]:
        bridge = bridge_of(plan)
        assert bridge is not None
        ends = (kept_steps(plan)[0], bridge, len(plan.steps))
        first, last = (lagrange(plan.sigmas, a, b, self.order) for a, b in pairwise(ends))
        return first, last

    def steps(self, plan: Plan) -> list[int]:
        if self.rule == "euler":
            return [len(kept_steps(plan))]
        return [sum(len(leap.steps[:2]) for leap in self._leaps(plan))]

    def rows(self, rollout: Rollout, common: Rows) -> list[PathRows]:
        plan, bridge = rollout.plan, bridge_of(rollout.plan)
        states = kept_states(rollout) | {len(plan.steps): rollout.x0}
        graded, rest = self._euler(plan) if self.rule == "euler" else self._lagrange(plan, states)
        steps = [graded_step.step for graded_step in graded]
        return [
            ShortcutRows(
                **vars(common),
                x=torch.stack([states[step] for step in steps], 1),
                sigmas=(*(plan.sigmas[step] for step in steps), 0.0),
                x0=rollout.x0,
                weights=tuple(graded_step.weight for graded_step in graded),
                scales=tuple(graded_step.scale for graded_step in graded),
                bridge=None if bridge is None else steps.index(bridge),
                alpha=self.alpha,
                tau=self.tau,
                rest=rest,
            )
        ]

    def _euler(self, plan: Plan) -> tuple[list[GradedStep], None]:
        lengths = [after - before for before, after in pairwise(plan.sigmas)]
        steps = kept_steps(plan)
        factor = rescaled([lengths[k] for k in steps], lengths, self.rescale)
        return [GradedStep(k, lengths[k], factor) for k in steps], None

    def _lagrange(
        self, plan: Plan, states: dict[int, Tensor]
    ) -> tuple[list[GradedStep], Float[Tensor, "b 2 *d"]]:
        """Steps with gradients, and the sums of the velocities without: these follow from two
        successive states of the trajectory."""
        graded: list[GradedStep] = []
        rests: list[Tensor] = []
        for leap in self._leaps(plan):
            factor = rescaled(leap.weights[:2], leap.weights, self.rescale)
            scales = [factor, factor * self.second]
            graded += map(GradedStep, leap.steps[:2], leap.weights[:2], scales)
            rest = torch.zeros_like(states[len(plan.steps)])
            for step, weight in list(zip(leap.steps, leap.weights, strict=True))[2:]:
                length = plan.sigmas[step + 1] - plan.sigmas[step]
                rest = rest + weight / length * (states[step + 1] - states[step])
            rests.append(rest)
        return graded, torch.stack(rests, 1)
