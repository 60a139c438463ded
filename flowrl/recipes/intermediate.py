"""Recipes with intermediate rewards:

scores of clean samples predicted from a trajectory's states. The common rules of
`flowrl/recipes/grpo.py` apply here too. `completion` is the number of ODE steps that complete a
state: null takes all remaining steps, and 1 is the projection x - sigma v, without additional
evaluations. `flowrl plan` shows the costs.
"""

from typing import Literal

import samplers
from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Clip, Estimator, Standardize, Sum
from flowrl.credit.intermediate import AbsoluteValue, Discounted, Potential, StepGain, TurningPoint
from flowrl.errors import UserError
from flowrl.likelihoods.transition import Transition
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.grpo import KlForm, Scale, anchors, named
from samplers import (
    CPS,
    Chain,
    ConstantSDE,
    FlowSDE,
    Frozen,
    Kernel,
    TableSDE,
    Tree,
    Window,
)


def dense_grpo(
    *, steps: int = 10, group: int = 24, eta: float = 0.7, noise: tuple[float, ...] = (),
    clip: float = 1e-4, kl: float = 0.04, completion: int | None = None,
    reward: Literal["gain", "value"] = "gain", scale: Scale = "group",
    kl_form: KlForm = "published", kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """DenseGRPO, arXiv:2601.20218: each step is credited with the reward gained between the clean
    samples that an ODE reaches from the states before and after it, standardised per group and
    step. SD3.5-M: 10 steps, group 24, KL 0.04 (GenEval, OCR) or 0.01 (PickScore), with Flow-GRPO's
    loss. `noise` is its table of calibrated noise, one number per step except the last, as found by
    `flowrl calibrate`; without it the noise is Flow-GRPO's with `eta`. `reward: value` is its
    weaker baseline; in the paper's ablation `completion: 1` is worse than no dense reward at all.

    Differences: the clip range is Flow-GRPO's, since the paper does not give one.
    """
    if noise and kernel is not None:
        raise UserError(
            "noise is a table of Flow-SDE's noise and cannot be combined with another kernel: "
            "give only one"
        )
    own: Kernel = TableSDE(noise) if noise else FlowSDE(eta)
    return Algorithm(
        steps=steps,
        plan=samplers.Looking(Chain(kernel or own, group), completion, first=reward == "gain"),
        advantage=Estimator((StepGain(reward == "gain"), Sum(), Standardize(scale), Clip())),
        likelihood=Transition(kl_form=kl_form),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )


def turning_point(
    *, steps: int = 10, group: int = 24, eta: float = 0.7, window: int | None = None,
    clip: float = 1e-5, kl: float = 0.0, completion: int | None = None,
    form: Literal["paper", "released"] = "released", bonus: float = 1.0, strict: bool = False,
    balanced: bool = False, kernel: Literal["cps", "flow_sde"] | Kernel = "cps",
) -> Algorithm:  # fmt: skip
    """TurningPoint-GRPO, arXiv:2602.06422: steps after which a trajectory moves towards its final
    reward get more credit. SD3.5-M: Flow-CPS with noise 0.7, 10 steps, all but the last noisy;
    FLUX: 6 steps, noise 0.8; group 24, clip 1e-5, no KL; `window` restricts noise to the first
    steps. `form: released` is the credit in all released configurations, R_n - R_0 + bonus d_i at
    turning points, and `form: paper` the credit in the paper, d_i but R_n - R_(i-1) at turning
    points. `strict` and `balanced` are its options.

    Differences: every noisy step has a reward, including the last one.
    """
    noise = named(kernel, {"cps": CPS(eta), "flow_sde": FlowSDE(eta)})
    own = Chain(noise, group) if window is None else Window(noise, group, window, Frozen())
    turns = TurningPoint(form, bonus, strict, balanced)
    return Algorithm(
        steps=steps,
        plan=samplers.Looking(own, completion),
        advantage=Estimator((turns, Sum(), Standardize("group"), Clip())),
        likelihood=Transition("cps" if isinstance(noise, CPS) else "density"),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )


def vgpo(
    *, steps: int = 10, group: int = 24, eta: float = 0.7, clip: float = 1e-4, kl: float = 0.04,
    gamma: float = 0.9, kappa: float = 0.1, share: float = 0.5,
    bounds: tuple[float, float] = (0.5, 2.0), completion: int | None = 1,
    kl_form: KlForm = "published", kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """VGPO, arXiv:2512.12387, according to reviews and summaries of the paper: a step's credit is
    the discounted sum of the rewards of the projections that follow it, plus a part that remains if
    a group has no spread. That part pulls towards samples of positive rewards and away from those
    of negative ones. KL 0.04, without which aesthetics degrade.

    Partly guessed: the sources do not give gamma, kappa, the position of the weight Q_k / mean Q,
    or the `bounds` that clip it (our addition). The absolute part applies to the first half of the
    steps, as reported. According to DenseGRPO's ablation rewards of projections are misleading:
    raise `completion`.
    """
    return Algorithm(
        steps=steps,
        plan=samplers.Looking(Chain(kernel or FlowSDE(eta), group), completion, first=False),
        advantage=Estimator(
            (Discounted(gamma), Sum(), AbsoluteValue(kappa, share, bounds), Clip())
        ),
        likelihood=Transition(kl_form=kl_form),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )


def pro_grpo(
    *, steps: int = 10, start: int = 48, keep: tuple[int, ...] = (24, 12),
    at: tuple[int, ...] = (5, 7),
    eta: float = 0.7, clip: float = 1e-4, kl: float = 0.04, scale: Scale = "group",
    kl_form: KlForm = "published", kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """Pro-GRPO, arXiv:2512.15347, following a detailed summary of its method: a group starts with
    more samples than it trains on. Before each step of `at` the projections are scored, and the
    `keep` samples whose rewards vary most continue. SD3.5-M: 10 steps, 48 to 24 to 12 samples
    before the steps 5 and 7; Flash 24, 16, 12; SD1.4 with 50 steps 48, 32, 8 before 30 and 40. The
    mean, the std and the loss use the remaining samples.

    Our choice: advantages are scaled by the group's std, and the loss is Flow-GRPO's. The mean of
    the remaining samples is not the policy's mean.
    """
    if not keep:
        raise UserError("pro_grpo: `keep` must list the sizes to which the group shrinks")
    own = Chain(kernel or FlowSDE(eta), keep[-1])
    return Algorithm(
        steps=steps,
        plan=samplers.Thinned(own, samplers.Thinning(at, keep, start)),
        advantage=Estimator((Standardize(scale), Clip())),
        likelihood=Transition(kl_form=kl_form),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )


def potential_tree(
    *, steps: int = 16, at: tuple[int, ...] = (0, 3, 6, 9), branch: int = 2, eta: float = 0.3,
    clip: float = 1e-4, kl: float = 0.0, weight: float = 1.0, completion: int | None = 1,
    kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """BranchGRPO's tree with a step-wise reward that may abstain, after the potential assessment of
    PARM, arXiv:2501.13926: a judge of predicted clean images decides whether they can still become
    good, and returns None if they are not clear enough to judge. Set it in `intermediate_rewards`.

    This is our own construction: PARM selects samples at inference, and only its abstract was used,
    so the numbers are our choice. A node's credit is its leaves' credit, standardised by depth,
    plus `weight` times the standardised reward of its own image, if it has one.
    """
    own = Standardize("group")
    return Algorithm(
        steps=steps,
        plan=samplers.Looking(
            Tree(kernel or ConstantSDE(eta), at, branch), completion, first=False
        ),
        advantage=Estimator((Sum(), own, Potential(weight), Clip())),
        likelihood=Transition(),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )
