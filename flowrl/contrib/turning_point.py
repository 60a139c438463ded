"""TurningPoint-GRPO: more credit for steps after which a trajectory goes where it ends."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Clip, Estimator, Standardize, Sum
from flowrl.credit.choices import Choices
from flowrl.credit.intermediate import refuse_intermediate, state_values
from flowrl.credit.values import Context, Credit, applying
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.number_checks import check_number
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors, named
from samplers import CPS, Chain, FlowSDE, Frozen, Kernel, Looking, Window
from samplers.number_ranges import AT_LEAST_0


@dataclass(frozen=True)
class TurningPoint:
    """Credit for the steps after which a trajectory moves towards its final reward:
    TurningPoint-GRPO (arXiv:2602.06422).

        d_i = R_i - R_{i-1}, c_i = sign(d_i) sign(R_n - R_0), turn_i = c_i > 0 and not c_{i-1} > 0

    R_i is the score after i of the n noisy steps; c_{i-1} must be below 0, except at the first
    step, which turns if c_1 > 0. Signs refer to the weighted sum of the rewards.

    form      paper     d_i, but R_n - R_{i-1} where step i turns
              released  R_n - R_0 + bonus d_i where step i turns (in all released configurations)
    strict    a turn also needs sign(d_i) = sign(R_n - R_i), which excludes the last step
    balanced  keeps as many turns with d_i > 0 as with d_i < 0 in the batch, of largest |d_i|
    """

    other_rewards = False
    form: Literal["paper", "released"] = "released"
    bonus: float = 1.0
    strict: bool = False
    balanced: bool = False

    def __post_init__(self) -> None:
        check_number("TurningPoint's bonus", self.bonus, AT_LEAST_0)

    def __call__(self, credit: Credit, context: Context) -> Credit:
        value, scored, noisy = state_values(credit, context)
        deciding = [k for k, is_noisy in enumerate(noisy) if is_noisy]
        steps = torch.tensor(deciding, dtype=torch.long)
        before, after, end = value[:, steps], value[:, steps + 1], value[:, -1:]
        # a turn reads the whole trajectory, and all rewards that apply have a part in its signs
        complete = scored[:, [*deciding, -1]].all(1, keepdim=True)
        abstained = ~applying(credit, context).any(1, keepdim=True)
        complete = (complete | abstained).all(-1, keepdim=True) & complete.any(-1, keepdim=True)
        weights = context.weights.to(value)
        turn = self.turns(before @ weights, after @ weights, end @ weights, complete[..., 0])
        if self.form == "paper":
            worth = torch.where(turn[..., None], end - before, after - before)
        else:
            worth = end - before[:, :1] + self.bonus * turn[..., None] * (after - before)
        mask = torch.zeros_like(credit.mask)
        mask[:, steps] = credit.mask[:, steps] & complete
        return Credit(torch.zeros_like(credit.value).index_copy(1, steps, worth) * mask, mask)

    def turns(
        self,
        before: Float[Tensor, "n i"],
        after: Float[Tensor, "n i"],
        end: Float[Tensor, "n 1"],
        complete: Bool[Tensor, "n 1"],
    ) -> Bool[Tensor, "n i"]:
        """Steps at which trajectories turn, from weighted sums of rewards."""
        gain = after - before
        toward = gain.sign() * (end - before[:, :1]).sign()
        last = torch.cat([torch.full_like(toward[:, :1], -1.0), toward[:, :-1]], 1)
        turn = (toward > 0) & (last < 0) & complete
        if self.strict:
            turn = turn & (gain.sign() == (end - after).sign())
        if not self.balanced:
            return turn
        ways = [turn & (gain * sign > 0) for sign in (1, -1)]
        most = min(int(way.sum()) for way in ways)
        size = gain.abs().flatten()
        balanced_turns = torch.zeros_like(size, dtype=torch.bool)
        for way in ways:
            order = size.masked_fill(~way.flatten(), -1.0).argsort(descending=True, stable=True)
            balanced_turns[order[:most]] = True
        return balanced_turns.view_as(turn)

    def refuses(self, choices: Choices) -> str | None:
        return refuse_intermediate(choices, chains=True)


@rests_on("code")
def turning_point(
    *, steps: int = 10, group: int = 24, eta: float = 0.7, window: int | None = None,
    clip: float = 1e-5, kl: float = 0.0, completion: int | None = None,
    form: Literal["paper", "released"] = "released", bonus: float = 1.0, strict: bool = False,
    balanced: bool = False, kernel: Literal["cps", "flow_sde"] | Kernel = "cps",
) -> Algorithm:  # fmt: skip
    """TurningPoint-GRPO, arXiv:2602.06422: steps after which a trajectory moves towards its final
    reward get more credit. SD3.5-M: Flow-CPS with eta 0.7, 10 steps, all but the last noisy;
    FLUX: 6 steps, eta 0.8; group 24, clip 1e-5, no KL; `window` restricts noise to the first
    steps. `form: released` is the credit in all released configurations, R_n - R_0 + bonus d_i at
    turning points, and `form: paper` the credit in the paper, d_i but R_n - R_(i-1) at turning
    points. `strict` and `balanced` are its options.

    Differences: every noisy step has a reward, including the last one.

    window    first steps that are noisy and trained, at least 1; null is all but the last
    form      credit of a step: `released`, R_n - R_0 + bonus d_i at turning points; `paper`, d_i,
              but R_n - R_(i-1) at turning points
    bonus     weight of the step's own gain d_i at a turning point, at least 0; no effect with
              `form: paper`
    strict    whether a turn must also point to the rest of the way, sign(d_i) = sign(R_n - R_i),
              which excludes the last step
    balanced  whether as many turns upwards as downwards are kept in the batch, those of the largest
              gains
    """
    noise = named(kernel, {"cps": CPS(eta), "flow_sde": FlowSDE(eta)})
    plan = Chain(noise, group) if window is None else Window(noise, group, window, Frozen())
    turns = TurningPoint(form, bonus, strict, balanced)
    return Algorithm(
        steps=steps,
        plan=Looking(plan, completion),
        advantage=Estimator((turns, Sum(), Standardize("group"), Clip())),
        likelihood=Transition("cps" if isinstance(noise, CPS) else "density"),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )
