"""Recipes that score the sampler's own noisy steps. Defaults are the published numbers.

Your own `kernel` replaces the published one, together with its `eta`. Common to all, and
deliberately different from released codes: the last step is deterministic and never trained; a
spread that is only rounding error counts as zero and gives an advantage of exactly 0; samples
without an advantage stay in the batch; every process uses the same trained steps.
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal

from flowrl.algorithm import Algorithm, Average, Decay
from flowrl.credit.advantages import (
    Clip,
    Estimator,
    ScaleSteps,
    Standardize,
    Sum,
    Transform,
)
from flowrl.credit.comparisons import PruneWidth
from flowrl.credit.proxies import Diverse, GateShare, ProxyGate
from flowrl.credit.trackers import NoTracker
from flowrl.errors import UserError
from flowrl.likelihoods.transition import KlForm, Transition
from flowrl.losses.averages import Refresh
from flowrl.losses.base import Anchor
from flowrl.losses.ratio import Surrogate
from flowrl.number_checks import check_number
from flowrl.recipes.credit_choices import CreditName, credit_chain, credit_tracker
from flowrl.recipes.evidence import rests_on
from samplers import (
    CPS,
    DDIM,
    Chain,
    ConstantSDE,
    Decaying,
    ExponentiallyDecaying,
    FlowSDE,
    Frozen,
    Kernel,
    Progressive,
    Random,
    WanSDE,
    Window,
    WindowPosition,
)
from samplers.number_ranges import ABOVE_0_TO_1


def anchors(kl: float) -> tuple[Anchor, ...]:
    """An anchor to the frozen initial model, or none if `kl` is 0."""
    return (Anchor(kl),) if kl else ()


def named(kernel: str | Kernel, kernels: Mapping[str, Kernel]) -> Kernel:
    """The kernel itself, or the kernel with that name in `kernels`."""
    return kernels[kernel] if isinstance(kernel, str) else kernel


Scale = Literal["group", "batch"]  # whose std: a group's own makes the least difference in it large


@rests_on("arrays", "flow_grpo_sde_step", "flow_grpo_wan_step", "pergroup_advantages")
def flow_grpo(
    *, steps: int = 10, group: int = 24, eta: float = 0.7, clip: float = 1e-4, kl: float = 0.04,
    scale: Scale = "batch", kernel: Literal["flow_sde", "wan"] | Kernel = "flow_sde",
    kl_form: KlForm = "published", credit: CreditName = "group", blend: float = 0.0,
) -> Algorithm:  # fmt: skip
    """Flow-GRPO, arXiv:2505.05470. SD3.5-M: 10 steps, eta 0.7, group 24, clip 1e-4, KL 0.04
    (GenEval, OCR) or 0.01 (PickScore); FLUX: 6 steps, eta 0.9, KL 0. `scale: batch` divides by the
    std of all samples (the code's global_std). `credit` takes another advantage (GDPO's, AAPO's, or
    the gap to the best other sample), and `blend` the share of the batch's advantage in groups
    without spread. Wan 2.1: its own noise (`kernel: wan`, no eta), 20 steps, clip 1e-3, KL 0.004,
    exact.

    The published KL lacks the step's length h in its denominator; `kl_form: exact` has it.
    Differences: samples with advantage 0 are kept, where the code removes them and refills the
    batch at random.
    """
    return Algorithm(
        steps=steps,
        plan=Chain(named(kernel, {"flow_sde": FlowSDE(eta), "wan": WanSDE()}), group),
        advantage=Estimator((*credit_chain(credit, Standardize(scale, blend=blend)), Clip())),
        likelihood=Transition(kl_form=kl_form),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
        tracker=credit_tracker(credit),
    )


@rests_on("arrays", "flow_cps_step")
def flow_grpo_fast(
    *, steps: int = 10, group: int = 24, eta: float = 0.8, clip: float = 1e-5, kl: float = 0.0,
    window: int = 3, kernel: Literal["cps", "flow_sde"] | Kernel = "cps",
    scale: Scale = "batch",
) -> Algorithm:  # fmt: skip
    """Flow-GRPO-Fast (same repository): noise in a window at a random start in the first half of
    the steps. Published with Flow-CPS (arXiv:2509.05952): eta 0.8, window 3, clip 1e-5,
    no KL.

    With CPS the log-ratio is the published score's, -|x_next - mean|^2. Differences: one window
    per iteration, where the code draws one per process and batch.
    """
    noise = named(kernel, {"cps": CPS(eta), "flow_sde": FlowSDE(eta)})
    return Algorithm(
        steps=steps,
        plan=Window(noise, group, window, Random(0, steps // 2)),
        advantage=Estimator((Standardize(scale), Clip())),
        likelihood=Transition("cps" if isinstance(noise, CPS) else "density"),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )


def each_reward(scale: Scale, after: tuple[Transform, ...] = ()) -> Estimator:
    """DanceGRPO's and MixGRPO's advantage: each reward by itself, with the unbiased std, then the
    weighted sum."""
    standardize = Standardize(scale, correction=1, eps=1e-8)
    return Estimator((standardize, Clip(), Sum(partial=True), *after))


@rests_on("arrays", "dance_flow_step", "dance_ddim_step")
def dance_grpo(
    *, steps: int = 16, group: int = 12, eta: float = 0.3, clip: float = 1e-4,
    fraction: float = 0.6, shared_noise: bool = True, train_share: float = 1.0,
    best_over: Literal["group", "batch"] = "group", scale: Scale = "group",
    kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """DanceGRPO, arXiv:2505.07818. FLUX: 16 steps, eta 0.3, group 12, 60 % of the steps trained,
    clip 1e-4, one initial noise per prompt; HunyuanVideo: eta 0.25, group 24 with separate noise,
    of which the best and worst `train_share` are trained on (1/3: best-of-N, 8 of 24), among a
    prompt's samples or, as in the code, among the samples of all prompts (`best_over: batch`).

    Differences: the trained steps are chosen once per iteration, not per sample; several rewards
    are summed as clipped advantages, not as losses; shared noise is shared within a prompt's group,
    not over all prompts of a process.

    train_share  share of the samples that are trained on, half of it the best and half the worst,
                 in (0, 1]; 1 trains on all, smaller is cheaper
    best_over    samples among which the best and worst are taken: a prompt's `group`, or the
                 `batch` of all prompts, which needs `train_share` below 1
    """
    check_number("train_share", train_share, ABOVE_0_TO_1)
    if best_over == "batch" and train_share == 1:
        raise UserError("best_over selects a share of the samples: set train_share below 1")
    ends = (PruneWidth("extremes", train_share, best_over),) if train_share < 1 else ()
    return Algorithm(
        steps=steps,
        plan=Chain(kernel or ConstantSDE(eta), group, fraction, shared_noise),
        advantage=each_reward(scale, ends),
        likelihood=Transition(),
        loss=Surrogate(clip, clip),
    )


ScheduleName = Literal["progressive", "random", "decaying", "exponential", "frozen"]


def _position(name: ScheduleName, every: int, stride: int, back: bool) -> WindowPosition:
    if back and name in ("random", "frozen"):
        raise UserError(
            f"schedule: {name} never moves, so it cannot roll back: leave roll_back out"
        )
    positions: dict[str, WindowPosition] = {
        "progressive": Progressive(every, stride, back),
        "random": Random(),
        "decaying": Decaying(every, stride=stride, roll_back=back),
        "exponential": ExponentiallyDecaying(every, stride=stride, roll_back=back),
        "frozen": Frozen(),
    }
    return positions[name]


@rests_on("arrays", "mixgrpo_step", "mixgrpo_window_schedule")
def mix_grpo(
    *, steps: int = 25, group: int = 12, eta: float = 0.7, clip: float = 1e-4, window: int = 4,
    stride: int = 1, every: int = 25, schedule: ScheduleName = "progressive",
    roll_back: bool = False, shared_noise: bool = True, kl: float = 0.0, scale: Scale = "group",
    kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """MixGRPO, arXiv:2507.21802. FLUX: 25 steps, SDE in a window of 4 that moves by 1 every 25
    iterations, eta 0.7, group 12, clip 1e-4, one initial noise per prompt. `schedule` is how the
    window moves: step by step (progressive), at random, with increasing speed (decaying,
    exponential), or not at all (frozen). `roll_back` returns to the first step after the last
    window.

    Differences: the window is never empty (the code's is, from iteration 575 on); a failed reward
    is left out, where the code counts it as 0.

    stride     steps by which the window moves, at least 1; no effect with `random` and `frozen`
    every      iterations after which the window moves, at least 1, at the start of the steps if it
               speeds up; larger moves it more slowly; no effect with `random` and `frozen`
    schedule   movement of the window: `progressive`, by `stride` steps; `random`, to a new place in
               each iteration; `decaying` and `exponential`, with increasing speed; `frozen`, not at
               all
    roll_back  whether the window returns to the first step after the last one; otherwise it stays
               there
    """
    position = _position(schedule, every, stride, roll_back)
    return Algorithm(
        steps=steps,
        plan=Window(kernel or FlowSDE(eta), group, window, position, shared_noise),
        advantage=each_reward(scale),
        likelihood=Transition(),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )


@rests_on("arrays", "grpo_guard_ratio_norm")
def grpo_guard(
    *, steps: int = 10, group: int = 24, eta: float = 0.7, clip: float = 2e-6, kl: float = 0.0,
    scale: Scale = "group", kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """GRPO-Guard, arXiv:2510.22319: RatioNorm, and steps reweighted by 1/h. SD3.5-M: 10 steps,
    eta 0.7, group 24, clip 2e-6 (PickScore 4e-6), no KL, group std.

    Differences: each row has its own correction of the ratio, where the code averages it over the
    micro-batch, so that clipped samples receive other samples' gradients; 1/h is relative to its
    mean over the trained steps, so that the scale of the learning rate and of the KL is unchanged.
    """
    return Algorithm(
        steps=steps,
        plan=Chain(kernel or FlowSDE(eta), group),
        advantage=Estimator((Standardize(scale), Clip(), ScaleSteps("1/h"))),
        likelihood=Transition("ratio_norm"),
        loss=Surrogate(clip, clip, anchors=anchors(kl)),
    )


@rests_on("code")
def gardo(
    *, steps: int = 10, group: int = 24, eta: float = 0.7, clip: float = 1e-4, kl: float = 0.04,
    auxiliary: tuple[str, ...] = ("aesthetic", "imagereward"), share: float = 0.1,
    adapt: bool = True, distance: str | None = "distance", refresh: int = 16,
    refresh_kl: float | None = 3e-4, kl_form: KlForm = "published", kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """GARDO, arXiv:2512.24138, from the abstract and the authors' code: Flow-GRPO without a std,
    against reward hacking. SD3.5-M: KL 0.04 (OCR) or 0.07 (GenEval), guidance 4.5.

    The KL counts only for samples that the trained reward ranks higher than the rewards `auxiliary`
    do: the `share` of these that differs most, which `adapt` moves between 0.02 and 0.2. It is
    measured from a copy of the weights, replaced after `refresh` iterations or above
    `refresh_kl`. Advantages of good samples grow with their `distance` to their group. These
    rewards have weight 0 in the run; without `distance` advantages stay as they are.

    Differences: the code gates samples that the trained reward ranks *worse* than the others do,
    which contradicts the abstract; it trains on the first 8 of 10 steps, here on 9, and takes the
    copy after a single optimizer step above `refresh_kl`, here after an iteration's mean above it.
    Ranks are shared by equal scores, where the code leaves them to the sort. Our `distance` is
    DINOv2's, theirs DINOv3's.

    kl          weight of the divergence from the recent copy, above 0; larger keeps the gated
                samples nearer to it
    auxiliary   labels of the rewards, of weight 0 in the run, whose mean rank a sample's rank by
                the trained reward is compared with; at least one
    share       share of the samples that the trained reward ranks too high for which the KL counts,
                in (0, 1); larger restrains more samples; the first share, if `adapt` moves it
    adapt       whether the share follows the mean disagreement of the rewards: 10 % up or down in
                an iteration, between 0.02 and 0.2
    distance    label of the reward, of weight 0, that scores the distance to the other samples of
                the group, by which advantages of good samples grow; null leaves them as they are
    refresh     iterations after which the copy that the KL is measured from is replaced, at least
                1; larger holds the policy back for longer
    refresh_kl  mean KL of an iteration above which the copy is replaced at once, above 0; null
                waits for `refresh`
    """
    gate = ProxyGate(auxiliary, share)
    baseline = Standardize(scale=None) if distance is None else Diverse(distance)
    return Algorithm(
        steps=steps,
        plan=Chain(kernel or FlowSDE(eta), group),
        advantage=Estimator((baseline, Clip(), gate)),
        likelihood=Transition(kl_form=kl_form),
        loss=Surrogate(clip, clip, anchors=(Anchor(kl, "recent", gated=True),)),
        averages=(Average("recent", Decay(start=1.0), Refresh(refresh, refresh_kl)),),
        tracker=partial(GateShare, auxiliary, share) if adapt else NoTracker,
    )


@rests_on("arrays", "mm_ddpo_ddim")
def ddpo(
    *, steps: int = 50, group: int = 16, eta: float = 1.0, clip: float = 1e-4,
    fraction: float = 1.0, kernel: Kernel | None = None,
) -> Algorithm:  # fmt: skip
    """DDPO-IS, arXiv:2305.13301: DDIM steps with noise, PPO's clip at 1e-4, for models trained on
    epsilon or v, and for flows. SD1.4: 50 steps, eta 1, statistics per prompt with eps 1e-6.

    Differences: a prompt's statistics come from its group, where the code keeps a buffer of 16 past
    rewards per prompt; the last step is deterministic, where the code draws noise there.
    """
    return Algorithm(
        steps=steps,
        plan=Chain(kernel or DDIM(eta), group, fraction),
        advantage=Estimator((Standardize(eps=1e-6), Clip())),
        likelihood=Transition(),
        loss=Surrogate(clip, clip),
    )
