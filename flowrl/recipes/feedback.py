"""Recipes with other kinds of feedback: divergences as trust regions, comparisons within groups,
weighted or selected steps. Defaults are the published numbers.

The common rules of `flowrl/recipes/grpo.py` apply here too. If a source is only an abstract or a
review, the recipe says so and lists our choices.
"""

from typing import Literal

from flowrl.algorithm import Algorithm, Average, Decay
from flowrl.credit.advantages import Clip, Estimator, Standardize
from flowrl.credit.steps import EvenGradients
from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.noise_levels import PermutedGrid, Uniform
from flowrl.likelihoods.transition import Transition
from flowrl.losses.divergence import TrustRegion
from flowrl.losses.preference import CentredReward, GroupPreference
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.credit_choices import CreditName, credit_chain, credit_tracker
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import Scale, anchors, named
from samplers import (
    CPS,
    DPM2M,
    FlowSDE,
    Kernel,
    Ode,
    Random,
    Scattered,
    Solver,
    WanSDE,
    Window,
)


@rests_on("code")
def flow_dppo(
    *, steps: int = 10, group: int = 16, eta: float = 0.8, most: float | None = None,
    kl: float = 0.001, noisy: int = 3, share: float = 0.5,
    away: Literal["ratio", "first_order"] = "ratio",
    kernel: Literal["flow_sde", "cps"] | Kernel = "flow_sde", scale: Scale = "batch",
    credit: CreditName = "group",
) -> Algorithm:  # fmt: skip
    """Flow-DPPO, arXiv:2606.11025: no clip range, but a trust region by the exact divergence of
    each step. SD3.5-M: 10 steps, 3 of them noisy, chosen at random in the first half, noise level
    0.8, group 16, KL 0.001. `most` is the divergence above which a row is no longer trained; null
    is the paper's 1e-7 for Flow-SDE and 1e-6 for CPS (the published programs set 1e-5 and 1e-6).
    With several rewards: `credit: gdpo` and equal weights.

    Differences: all prompts of an iteration share the noisy steps. Your own kernel needs its own
    `most`, since the scale depends on the noise.

    most   divergence of a step above which a row that would move further is not trained, above 0;
           larger allows larger updates
    noisy  noisy and trained steps of an iteration, at least 1; more train more of each sample, and
           cost more
    share  share of the steps, from the first on, among which the noisy ones are drawn, in (0, 1]
    away   the sign that says whether a row would move further: of the `ratio` minus 1, as
           published, or of the divergence's own change (`first_order`)
    """
    noise = named(kernel, {"flow_sde": FlowSDE(eta), "cps": CPS(eta)})
    if most is None and not isinstance(noise, FlowSDE | CPS):
        raise UserError(
            f"most: the kernel {type(noise).__name__} has no published divergence; set most, about "
            "1e-7 for noise as large as Flow-SDE's"
        )
    least = 1e-6 if isinstance(noise, CPS) else 1e-7
    return Algorithm(
        steps=steps,
        plan=Scattered(noise, group, noisy, share),
        advantage=Estimator((*credit_chain(credit, Standardize(scale)), Clip())),
        likelihood=Transition(means=True),
        loss=TrustRegion(most=least if most is None else most, away=away, anchors=anchors(kl)),
        tracker=credit_tracker(credit),
    )


@rests_on("arrays", "mm_dgpo_loss")
def dgpo(
    *, steps: int = 10, group: int = 24, levels_per_sample: int = 4, levels: float = 0.7,
    beta: float = 100.0, clip: float | None = 0.01, kl: float = 0.001, clip_kl: bool = False,
    reference: Literal["start", "average"] = "start", switch: int = 200,
    solver: Solver | None = None,
) -> Algorithm:  # fmt: skip
    """DGPO, arXiv:2510.08425: Diffusion-DPO between the good and the bad part of a group. SD3.5-M:
    10 steps, group 24, one noise per group and level, 4 of the first 7 levels (GenEval 5), beta 100
    (PickScore 10), clip 0.01, KL 0.001; from optimizer step `switch` on (GenEval 500), samples come
    from an average with decay min(0.3, 0.001 s). Without guidance: `reference: average`, beta 2000,
    clip 1e-5. Training keeps the activations of a whole group, whatever `train.rows_per_call` is.

    Differences: the reference uses the training's guidance, where the code uses 4.5 in two of its
    modes; at the switch the sampling average starts as a copy of the current weights, and follows
    with the published decay.

    levels     share of the grid's noise levels, from the noisiest on, that training draws from, in
               (0, 1]
    beta       sharpness of the preference, above 0: a group has the weight sigmoid(beta / G sum A
               (d - d_ref)), so that with a larger one groups that are ranked right already stop
               training sooner
    clip       change exp(d_slow - d) of a sample's error d, relative to the slow average, beyond 1
               + clip or below 1 - clip at which its gradient stops, above 0; smaller makes smaller
               updates, null is without
    clip_kl    whether the clip stops the gradient of the divergence too; needs `clip` and `kl`
    reference  the policy that the preference is relative to: the initial one (`start`), or an
               `average` with decay min(0.3, 0.001 s)
    switch     optimizer step from which samples come from the average, not the trained policy, at
               least 0
    """
    late = min(0.3, 0.001 * switch)
    return Algorithm(
        steps=steps,
        plan=Ode(group, solver or DPM2M()),
        advantage=Estimator((Standardize("batch"), Clip())),
        likelihood=Matching(
            levels_per_sample, PermutedGrid(levels), together=group, same_noise=True
        ),
        loss=GroupPreference(
            group, beta, clip, kl, clip_kl, reference="ref" if reference == "start" else "slow"
        ),
        averages=(
            Average("slow", Decay(slope=0.001, most=0.3)),
            Average("trailing", Decay(late, slope=0.001, flat=switch, most=0.3)),
        ),
        behaviour="trailing",
    )


@rests_on("arrays", "mm_crd_loss")
def crd(
    *, steps: int = 10, group: int = 24, levels_per_sample: int = 20, beta: float = 1.0,
    kl: float = 0.1, temperature: float | None = None, kind: Literal["mse", "bce"] = "mse",
    decay: tuple[int, float, float] = (75, 0.0075, 0.999), solver: Solver | None = None,
) -> Algorithm:  # fmt: skip
    """CRD, centred reward distillation, arXiv:2603.14128, following Flow-Factory's code: each
    sample's implicit reward is regressed on its advantage, both centred per group. SD3.5-M, OCR: 10
    steps, group 24, 20 levels, KL 0.1. Implicit rewards are relative to an average with decay
    min(0.999, 0.25 + 0.005 s); samples come from an average with decay min(most, slope (s - flat)),
    0 before flat: `decay` is (flat, slope, most). Training keeps the activations of a whole group.

    Differences: values are centred within a prompt's group, as reported of the paper, where the
    code centres over a micro-batch; levels are stratified and uniform, where the code's 20 draws
    are all equal; the reference uses the training's guidance.

    beta         scale of implicit rewards before they are compared with advantages, above 0; larger
                 needs a smaller change of the policy for the same advantage
    temperature  spread of the weights softmax(a / temperature) of the group's mean, whose loss is
                 averaged with that of softmax(-a / temperature); at least 0; larger weighs samples
                 more equally, null equally
    kind         the loss of implicit rewards and advantages: their squared error (`mse`) or
                 cross-entropy (`bce`)
    """
    flat, slope, most = decay
    return Algorithm(
        steps=steps,
        plan=Ode(group, solver or DPM2M()),
        advantage=Estimator((Standardize("batch"), Clip())),
        likelihood=Matching(levels_per_sample, Uniform(), together=group),
        loss=CentredReward(group, beta, kl, temperature, kind),
        averages=(
            Average("slow", Decay(0.25, slope=0.005, most=0.999)),
            Average("trailing", Decay(flat=flat, slope=slope, most=most)),
        ),
        behaviour="trailing",
    )


@rests_on("code")
def flash_grpo(
    *, steps: int = 20, group: int = 24, eta: float = 0.7, clip: float = 1e-3, kl: float = 0.0,
    kernel: Literal["wan", "flow_sde"] | Kernel = "wan", scale: Scale = "batch",
) -> Algorithm:  # fmt: skip
    """Flash-GRPO, arXiv:2605.15980: one noisy step per sample, drawn from the first half of the
    steps, with a weight that equalises the gradient sizes of all steps. Wan 2.1: 20 steps,
    Wan's own noise (no eta), clip 1e-3, no KL.

    Differences: all prompts of an iteration share the noisy step, where the code draws one per
    prompt; the weight is relative to the mean over the steps that can be drawn, where the code uses
    the mean over the steps that were drawn. The published group is 4; the default of 24 is ours,
    the group of the other recipes.

    eta  noise of a sampling step with `kernel: flow_sde`, at least 0; `wan` has none to set
    """
    noise = named(kernel, {"wan": WanSDE(), "flow_sde": FlowSDE(eta)})
    return Algorithm(
        steps=steps,
        plan=Window(noise, group, 1, Random(0, steps // 2)),
        advantage=Estimator((Standardize(scale), Clip(), EvenGradients(0.5))),
        likelihood=Transition(),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )
