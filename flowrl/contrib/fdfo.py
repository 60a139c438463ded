"""FDFO: velocities moved along differences of samples that differ only by small noise."""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Estimator, Standardize
from flowrl.credit.choices import Choices, image_plans, text_plans
from flowrl.errors import UserError
from flowrl.likelihoods.rows import (
    Evaluation,
    Evaluations,
    PointMask,
    PointValues,
    Rows,
    StoredRows,
    once_per_state,
)
from flowrl.likelihoods.transition import NEEDS_TOKEN, mse, states_of
from flowrl.losses.base import PolicyTerm, RatioLoss
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors
from samplers import Chain, Kernel, Rollout, Velocity
from samplers.host import filled_rows, sent
from samplers.kernels import AnyLevels, Gaussian, euler, per_row


@dataclass(frozen=True)
class Churn(AnyLevels):
    """A deterministic step to below the next level, then fresh noise back up to it: FDFO,
    arXiv:2603.12893.

    Formula: x' = (x - (s - r) v + r sqrt((1 + gamma)^2 - 1) noise) / (1 + gamma r),
    r = s' / (1 + gamma (1 - s')), s' = sigma_next

    The level of x_next is sigma_next whatever gamma; the std is about sigma_next sqrt(2 gamma).
    """

    affine = True
    gamma: float = 0.0025

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < math.inf:
            raise ValueError(
                f"gamma, the share of noise to renew, must be at least 0, not {self.gamma}"
            )

    def __call__(self, x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> Gaussian:
        low = sigma_next / (1 + self.gamma * (1 - sigma_next))
        up = 1 + self.gamma * low
        std = low * math.sqrt((1 + self.gamma) ** 2 - 1) / up
        return Gaussian(euler(x, v, sigma, low) / per_row(up, x), std)


@dataclass(frozen=True)
class DirectionRows(StoredRows):
    """States along the samples' trajectories, with the direction from the group's mean sample to
    each sample."""

    stored = ("x", "direction")
    x: Float[Tensor, "b *d"]
    sigma: Float[Tensor, " b"]
    direction: Float[Tensor, "b *d"]  # over its mean square


LEAST_SIZE = 1e-6  # of the mean square of a difference of samples


@dataclass(frozen=True)
class Directional:
    """Movement of velocities towards a sample: FDFO (arXiv:2603.12893).

        log r = mean(delta^2) - mean((v - v_old + delta)^2),
        delta = (x0 - group mean) / mean((x0 - group mean)^2)

    Samples of a group share their initial noise and diverge by small noise in each step. v
    points from the sample to the noise, so the ratio rises as v moves along -delta, and x0 along
    delta. There is no density: an evaluation has velocities, and its log-likelihood is 0.
    """

    unit = 1
    keep_mean = False
    text = False

    def refuses(self, choices: Choices) -> str | None:
        """Refuses plans whose samples start from different noise, or branch."""
        if text_plans(choices):
            return NEEDS_TOKEN
        for plan in image_plans(choices):
            chain = plan.shared_noise and set(plan.nodes) == {plan.group}
            if not chain or not any(step.train for step in plan.steps):
                return (
                    "Directional compares samples that differ only in the noise of their trained "
                    "steps: use Chain or Window with shared_noise=True"
                )
        return None

    def rows(
        self, rollout: Rollout, advantage: PointValues, mask: PointMask
    ) -> list[DirectionRows]:
        """One `Rows` per trained step."""
        grouped = rollout.x0.view(-1, rollout.plan.group, *rollout.x0.shape[1:])
        difference = (grouped - grouped.mean(1, keepdim=True)).flatten(0, 1)
        size = difference.square().flatten(1).mean(1)
        direction = rollout.storage.put(difference / per_row(size + LEAST_SIZE, difference))
        device = rollout.prompt.device
        return [
            DirectionRows(
                prompt=edges.prompt,
                advantage=sent(advantage[:, edges.step, None].to(edges.logp.dtype), device),
                mask=sent(mask[:, edges.step, None], device),
                old=None,
                x=edges.x,
                sigma=filled_rows(
                    len(edges.x), rollout.plan.steps[edges.step].sigma, edges.logp.dtype, device
                ),
                direction=direction,
                state=states_of(rollout, edges),
            )
            for edges in rollout.edges
        ]

    def evaluate(self, policy: Velocity, rows: DirectionRows) -> Evaluation:
        (v,) = once_per_state(rows, lambda r: [policy(r.x, r.sigma, r.prompt)])
        v = v.to(rows.direction.dtype)
        return Evaluation(v.flatten(1)[:, :1].detach() * 0, v)

    def log_ratio(
        self, new: Evaluation, old: Evaluation, rows: DirectionRows
    ) -> Float[Tensor, "b 1"]:
        assert new.out is not None and old.out is not None
        still = rows.direction.square().flatten(1).mean(1, keepdim=True)
        return still - mse(new.out - old.out, -rows.direction)

    def kl(self, new: Evaluation, ref: Evaluation, rows: DirectionRows) -> Float[Tensor, "b 1"]:
        """Divergence from the reference policy, |v - v_ref|^2."""
        return mse(new.out, ref.out)


@dataclass(frozen=True, kw_only=True)
class Quadratic(RatioLoss):
    """Policy gradient with a quadratic penalty on the ratio instead of a clip: SPO
    (arXiv:2401.16025).

        loss = -r A + |A| / (2 bound) (r - 1)^2

    Its minimum is at r = 1 + bound for A > 0 and at 1 - bound for A < 0.
    """

    homogeneous = True
    bound: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.bound < math.inf:
            raise UserError(f"the bound of a quadratic penalty must be above 0, not {self.bound}")

    def policy(self, log_ratio: Tensor, evaluations: Evaluations, rows: Rows) -> PolicyTerm:
        ratio, a = log_ratio.exp(), rows.advantage
        return -ratio * a + a.abs() / (2 * self.bound) * (ratio - 1).square(), {}


@rests_on("code")
def fdfo(
    *, steps: int = 40, group: int = 2, gamma: float = 0.0025, bound: float = 0.03,
    kl: float = 0.0, kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """FDFO, finite-difference flow optimisation, arXiv:2603.12893: two samples from the same
    initial noise are separated by small noise in each step, and every step's velocity is moved
    along the difference of the samples, in proportion to the difference of their rewards. 40 steps,
    pairs, gamma 0.0025, bound 0.03, no KL. Rewards are not standardised: their scale acts like a
    learning rate.

    Differences: the samples of a pair share their initial noise, where the code perturbs it too;
    the state before the last step is not trained; a larger `group` compares each sample with the
    mean of all, where the code uses pairs.

    gamma  share of the noise that each step renews, above 0; larger separates the samples of a
           group more
    bound  change of the ratio, above 0, at which the quadratic penalty balances the advantage;
           larger makes larger updates
    """
    return Algorithm(
        steps=steps,
        plan=Chain(kernel or Churn(gamma), group, shared_noise=True),
        advantage=Estimator((Standardize(None),)),
        likelihood=Directional(),
        loss=Quadratic(bound=bound, anchors=anchors(kl)),
    )
