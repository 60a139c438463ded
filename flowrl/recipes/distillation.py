"""Distillation of loaded teachers, one for each prompt's task, into one student.

The run file lists the teachers (`teachers`); the common rules of `flowrl/recipes/grpo.py` apply.
"""

from typing import Literal

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Clip, Estimator, Rescale, Standardize
from flowrl.credit.uncompared import Uncompared
from flowrl.errors import UserError
from flowrl.likelihoods.transition import Transition
from flowrl.losses.averages import TEACHER
from flowrl.losses.base import Anchor
from flowrl.losses.distillation import Distillation
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import KlForm, Scale, anchors, named
from samplers import CPS, FlowSDE, Kernel, Random, Window


@rests_on("code")
def opd(
    *, steps: int = 10, group: int = 8, eta: float = 0.8, window: int = 3, weight: float = 1.0,
    form: KlForm = "exact", task: float = 0.0, clip: float = 1e-4, kl: float = 0.0,
    scale: Scale = "group", kernel: Literal["cps", "flow_sde"] | Kernel = "cps",
) -> Algorithm:  # fmt: skip
    """OPD, on-policy distillation, arXiv:2605.15055 (DiffusionOPD) and arXiv:2605.08063 (Flow-OPD's
    `gkd`): the student samples, and each of its noisy steps is pulled towards the step of the
    teacher for that prompt's task. SD3.5-M, OCR (verl-omni): 10 steps, Flow-CPS with eta 0.8 in a
    window of 3 of the first 5, 8 samples, no KL. Rewards are only monitored, and a group may have a
    single sample.

    `form` is the divergence: `exact`, `published` (verl-omni's, smaller by h), `velocity` or `mean`
    (UniRL's without the denominator). `task` above 0 adds the clipped surrogate of the rewards with
    this weight. Differences: teachers use the training's guidance; samples without a score are left
    out, as in every recipe; states of steps without noise are not distilled.

    group   samples per prompt, at least 1; they are compared only with `task`, which needs 2
    weight  weight of the divergence from the teacher, above 0; larger follows it more closely,
            relative to `task` and `kl`
    form    form of the divergence from the teacher: `exact`, of the two steps; `published`, smaller
            by the step's length; `velocity`, |v - v_teacher|^2; `mean`, the means' squared distance
    task    weight of the rewards' clipped surrogate beside the teacher, at least 0; 0 only monitors
            rewards
    clip    clip range of the ratio p_new / p_old in the rewards' term, in (0, 1]; no effect without
            `task`
    scale   whose standard deviation divides advantages, the prompt's `group` or the whole `batch`;
            no effect without `task`
    """
    if weight <= 0:
        raise UserError(
            f"weight must be above 0, not {weight}: without it the teacher has no effect"
        )
    if task < 0:
        raise UserError(
            f"task must be at least 0 (0 is off), not {task}: otherwise training would lower "
            "the rewards"
        )
    noise = named(kernel, {"cps": CPS(eta), "flow_sde": FlowSDE(eta)})
    credit = (Standardize(scale), Clip(), Rescale(1.0, task)) if task else (Uncompared(),)
    distilled = Distillation(weight=weight, anchors=anchors(kl))
    combined = Surrogate(clip, clip, anchors=(Anchor(weight, TEACHER), *anchors(kl)))
    return Algorithm(
        steps=steps,
        plan=Window(noise, group, window, Random(0, steps // 2)),
        advantage=Estimator(credit),
        likelihood=Transition("cps" if isinstance(noise, CPS) else "density", form),
        loss=combined if task else distilled,
    )
