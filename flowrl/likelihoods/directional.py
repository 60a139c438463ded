"""A sample as one action: how far velocities move towards it, away from its group's mean."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from flowrl.credit.choices import Choices, image_plans, text_plans
from flowrl.likelihoods.rows import (
    DirectionRows,
    Evaluation,
    PointMask,
    PointValues,
    once_per_state,
)
from flowrl.likelihoods.transition import NEEDS_TOKEN, mse, states_of
from samplers import Rollout, Velocity
from samplers.host import filled_rows, sent
from samplers.kernels import per_row

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
        kept = rollout.storage.put(difference / per_row(size + LEAST_SIZE, difference))
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
                direction=kept,
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
