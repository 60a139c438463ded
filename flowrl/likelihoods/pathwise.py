"""Samples as differentiable functions of the network: no density, but the path to a clean sample.

A gradient method rebuilds the sample of each row by a few steps with gradients, and the reward's
gradient at the end of these steps trains the network
(`flowrl/iteration/features/reward_gradient.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from flowrl.credit.choices import Choices, image_plans, samples_itself, text_plans
from flowrl.errors import UserError
from flowrl.likelihoods.rows import Evaluation, PointMask, PointValues, Rows
from flowrl.likelihoods.transition import NEEDS_TOKEN, mse
from flowrl.number_checks import check_number
from samplers import Plan, Rollout, Velocity
from samplers.host import filled_rows, sent
from samplers.noise import key_hash, keyed_noise
from samplers.number_ranges import BETWEEN_0_AND_1
from samplers.scheduler import unbound
from samplers.untyped import evaluated_again


@dataclass(frozen=True)
class PathRows(Rows):
    """States from which clean samples are rebuilt, all through the same levels.

    x         the states at the first of `sigmas`
    sigmas    the levels that Euler steps with gradients visit, falling or rising
    noise     the noise in x, which is subtracted from the last state; None: the last state is clean
    swapped   whether a relative reward's two words are exchanged
    strength  extra weight of the first of these words
    weight    a factor on each row's loss, known once its path is; None: 1
    """

    x: Float[Tensor, "b *d"]
    sigmas: tuple[float, ...]
    noise: Float[Tensor, "b *d"] | None = None
    swapped: bool = False
    strength: float = 0.0
    weight: Float[Tensor, "b 1"] | None = None

    def known_states(self) -> list[Tensor] | None:
        """States at which the path evaluates velocities; None if they follow from the path."""
        return [self.x] if len(self.sigmas) == 2 else None

    def path(self, policy: Velocity) -> "Path":
        """Rebuild the samples; if their noise is known, x0 = (x - sigma noise) / (1 - sigma)."""
        path = euler_path(policy, self.x, self.sigmas, self.prompt)
        if self.noise is None:
            return path
        end = self.sigmas[-1]
        return path._replace(x0=(path.x0 - end * self.noise) / (1 - end))


class Path(NamedTuple):
    """Clean samples with gradients, the states in between (detached), the velocities there, and a
    weight for each sample's loss."""

    x0: Float[Tensor, "b *d"]
    states: list[Tensor]
    velocities: list[Tensor]
    weight: Float[Tensor, "b 1"] | None = None


@runtime_checkable
class Starts(Protocol):
    """Chooses the states from which a rollout's samples are rebuilt."""

    inside: bool  # whether states inside a path follow from the trained policy

    def steps(self, plan: Plan) -> list[int]:
        """Number of steps with gradients for each row of a sample."""
        ...

    def rows(self, rollout: Rollout, common: Rows) -> list[PathRows]: ...

    def refuses(self, choices: Choices) -> str | None: ...


def euler_path(
    policy: Velocity, x: Float[Tensor, "b *d"], sigmas: Sequence[float], prompt: Tensor
) -> Path:
    """Euler steps through the levels, with gradients if they are enabled.

    Formula: x' = x + (sigma' - sigma) v(x, sigma)

    With several steps only the states between them are kept, and backward evaluates each step once
    more. `x0` of the result is the last state.
    """
    states: list[Tensor] = []
    velocities: list[Tensor] = []
    again = torch.is_grad_enabled() and len(sigmas) > 2
    for sigma, to in pairwise(sigmas):
        dtype = torch.promote_types(x.dtype, torch.float32)
        level = filled_rows(len(x), sigma, dtype, x.device)
        v = evaluated_again(policy, x, level, prompt) if again else policy(x, level, prompt)
        states.append(x.detach())
        velocities.append(v)
        x = (x + (to - sigma) * v).to(x.dtype)
    return Path(x, states, velocities)


@dataclass(frozen=True)
class Pathwise:
    """A clean sample as a differentiable function of the network, rebuilt from a known state.

        x0 = x + sum (sigma' - sigma) v(x_sigma, sigma), minus the remaining part of a known noise

    starts  the states: `Renoised`, `KnownNoise`, or those of `flowrl.likelihoods.shortcuts`

    Anchors compare velocities at the states of the path, which are treated as constants.
    """

    starts: Starts
    unit = 1
    keep_mean = False
    text = False

    def refuses(self, choices: Choices) -> str | None:
        """Refuses text plans, steered plans, and whatever the starts refuse."""
        if text_plans(choices):
            return NEEDS_TOKEN
        if not samples_itself(choices):
            return (
                "steer: steered samples are not the policy's own, so they cannot be rebuilt: "
                "leave it out"
            )
        if any(map(unbound, image_plans(choices))):
            return (
                "kernel: scheduler does not take the Euler steps that reward gradients need: use "
                "a policy-gradient or matching recipe"
            )
        return self.starts.refuses(choices)

    def rows(self, rollout: Rollout, advantage: PointValues, mask: PointMask) -> list[PathRows]:
        """Rows of all starts. `advantage` is kept, although no loss reads it."""
        credit = sent(advantage[:, -1:].to(rollout.x0.dtype), rollout.x0.device)
        trained = sent(mask[:, -1:], rollout.x0.device)
        return self.starts.rows(rollout, Rows(rollout.prompt, credit, trained, None))

    def graded(self, plan: Plan, anchors: int) -> int:
        """Network evaluations with gradients per draw, for a loss that compares with this many
        other policies. With several steps each step is evaluated twice, and once more for
        anchors."""
        per_step = 3 if anchors else 2
        return plan.group * sum(k if k == 1 else per_step * k for k in self.starts.steps(plan))

    def frozen(self, plan: Plan, anchors: int) -> int:
        """Evaluations without gradients per draw: of each of this many other policies, and of the
        trained policy if states inside a path must be computed first."""
        if not anchors:
            return 0
        steps = self.starts.steps(plan)
        more = self.starts.inside
        return plan.group * sum(anchors * k + (k if more and k > 1 else 0) for k in steps)

    def decoded(self, plan: Plan) -> int:
        """Samples per draw that are decoded with gradients."""
        return plan.group * len(self.starts.steps(plan))

    def path(self, policy: Velocity, rows: PathRows) -> Path:
        """Rebuild the samples of the rows."""
        return rows.path(policy)

    def at(self, policy: Velocity, rows: PathRows, states: Sequence[Tensor]) -> Evaluation:
        """Velocities at the given states of the path, side by side; no log-likelihood."""
        parts = [
            euler_path(policy, x, (sigma, sigma), rows.prompt).velocities[0]
            for x, sigma in zip(states, rows.sigmas[:-1], strict=True)
        ]
        return velocities_of(parts)

    def evaluate(self, policy: Velocity, rows: PathRows) -> Evaluation:
        """Evaluate the velocities along the path."""
        return velocities_of(self.path(policy, rows).velocities)

    def log_ratio(self, new: Evaluation, old: Evaluation, rows: PathRows) -> Tensor:
        raise UserError("a path has no density and therefore no ratio: use the loss RewardGradient")

    def kl(self, new: Evaluation, ref: Evaluation, rows: PathRows) -> Float[Tensor, "b 1"]:
        """Divergence |v - v_ref|^2, averaged over the path's states."""
        return mse(new.out, ref.out)


def velocities_of(parts: Sequence[Tensor]) -> Evaluation:
    out = torch.stack(list(parts), 1)
    return Evaluation(out.detach().flatten(1)[:, :1] * 0, out)


@dataclass(frozen=True)
class KnownNoise:
    """Starts from clean samples with the noise from which they were sampled: Direct-Align
    (arXiv:2509.06942).

    One step with gradients from a level down to s, or up to s from a lower one; the noise that
    remains at s is known and subtracted exactly. s is drawn once per iteration from the range
    `levels`, and the other level is the fraction `width` of the range away, within the range.

    both       also take the step upwards, whose gradient has the opposite sign
    strengths  extra weight of a relative reward's first word at the lowest and the highest s, for
               the step down and for the step up

    levels  [lowest, highest] level s
    width   distance of the other level, as a share of that range, in (0, 1)
    """

    levels: tuple[float, float] = (0.75, 27 / 28)
    width: float = 0.101
    both: bool = False
    strengths: tuple[tuple[float, float], tuple[float, float]] = ((0.0, 0.0), (0.0, 0.0))
    inside = True

    def __post_init__(self) -> None:
        check_number("KnownNoise's width, a share of the levels,", self.width, BETWEEN_0_AND_1)

    def refuses(self, choices: Choices) -> str | None:
        low, high = self.levels
        if not 0 < low < high < 1:
            return f"levels are two numbers with 0 < low < high < 1, not {low}, {high}"
        return None

    def steps(self, plan: Plan) -> list[int]:
        return [1] * (1 + self.both)

    def rows(self, rollout: Rollout, common: Rows) -> list[PathRows]:
        """Rows of one step down and one step up. m is the index of s in the levels, from 0.005 to
        0.995."""
        rng = torch.Generator().manual_seed(
            key_hash(rollout.seed, rollout.iteration, "known noise", rollout.index)
        )
        m = 0.005 + 0.99 * float(torch.rand((), generator=rng, dtype=torch.float64))
        low, high = self.levels
        reach, noise = min(self.width, m, 1 - m), noise_of(rollout, "root")
        ways = [(m + reach, False, self.strengths[0]), (m - reach, True, self.strengths[1])]
        rows: list[PathRows] = []
        for place, swapped, (first, last) in ways[: 1 + self.both]:
            sigma, end = (low + at * (high - low) for at in (place, m))
            x = (1 - sigma) * rollout.x0 + sigma * noise
            rows.append(
                PathRows(
                    **vars(common),
                    x=x,
                    sigmas=(sigma, end),
                    noise=noise,
                    swapped=swapped,
                    strength=first + m * (last - first),
                )
            )
        return rows


def noise_of(rollout: Rollout, *purpose: int | str) -> Float[Tensor, "n *d"]:
    """Keyed noise of each sample; the purpose "root" gives the noise from which it was sampled."""
    group, key = rollout.plan.group, (rollout.seed, rollout.iteration)
    keys = [(*key, draw, *purpose, node) for draw in rollout.draws for node in range(group)]
    x0 = rollout.x0
    shape = tuple(x0.shape[1:])
    return keyed_noise(rollout.noise, keys, shape, x0.dtype, x0.device, rollout.layout)
