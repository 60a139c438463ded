"""Recipes that regress the velocity on clean samples of any sampler. Defaults are the published
numbers. They train the velocity itself, so train at guidance 1, since a guided velocity is a biased
target.

`solver` is your own sampler in place of the published one.
"""

from typing import Literal

from flowrl.algorithm import Algorithm, Average, Decay
from flowrl.credit.advantages import Clip, Estimator, Rescale, Standardize, Sum
from flowrl.credit.comparisons import BestWorst, Exponential
from flowrl.errors import UserError
from flowrl.likelihoods.matching import Matching, WeightingName, weighting
from flowrl.likelihoods.noise_levels import Discrete, LogitNormal, PermutedGrid, Times, Uniform
from flowrl.losses.base import Anchor
from flowrl.losses.preference import Preference
from flowrl.losses.ratio import Surrogate
from flowrl.losses.regression import NFT, Weighted
from flowrl.recipes.credit_choices import CreditName, credit_chain, credit_tracker
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors
from samplers import DPM2M, SA, Euler, Ode, Solver

TimesName = Literal["discrete", "discrete_with_init", "discrete_wo_init", "logit_normal", "uniform"]


def awm_times(name: TimesName) -> Times:
    """AWM's five ways to draw noise levels, with its names and numbers."""
    times: dict[str, Times] = {
        "discrete": Discrete(0.9, "any"),
        "discrete_with_init": Discrete(0.9, "with"),
        "discrete_wo_init": Discrete(0.9, "without"),
        "logit_normal": LogitNormal(3.0, 0.01),
        "uniform": Uniform(0.2, 3.0),
    }
    return times[name]


@rests_on("arrays", "mm_awm_loss", "mm_awm_weightings", "mm_awm_time_samplers", "mm_awm_sa_solver")
def awm(
    *, steps: int = 14, group: int = 24, levels_per_sample: int = 6, clip: float = 1.0,
    noise: float = 0.4, weight: WeightingName = "ghuber",
    times: TimesName = "discrete_wo_init", kl: float = 0.001, solver: Solver | None = None,
) -> Algorithm:  # fmt: skip
    """Advantage Weighted Matching, arXiv:2509.25050. SD3.5-M: 14 steps of SA-Solver with noise 0.4
    (PickScore 0), group 24, 6 noise levels per sample, weight ghuber with power 0.25, |A| at most
    1, clip 1, KL 0.001 to the initial policy (OCR 0.003, PickScore 0.0001) and 1 to an average with
    decay min(0.3, 0.001 s).

    Differences: the loss also works without a KL; there is one ratio per sample and level
    (`exp_first`), and averaging over levels first is not offered; training uses the levels of the
    grid, where the code moves two of them for the rollout only.

    noise  noise of SA-Solver in the steps that end in the levels 0.3 to 0.9, at least 0; 0 is
           deterministic; no effect with another solver
    times  noise levels of training: from the sampler's grid, its first 90 % (`discrete`), without
           the pure noise (`discrete_wo_init`) or with it each time (`discrete_with_init`); or
           `logit_normal`, or `uniform`, both shifted by 3
    """
    return Algorithm(
        steps=steps,
        plan=Ode(group, solver or SA(noise)),
        advantage=Estimator((Standardize("batch"), Clip(5.0), Rescale(5.0, 1.0))),
        likelihood=Matching(levels_per_sample, awm_times(times), weighting(weight)),
        loss=Surrogate(clip, clip, anchors=(*anchors(kl), Anchor(1.0, "trust"))),
        averages=(Average("trust", Decay(slope=0.001, most=0.3)),),
    )


@rests_on("arrays", "mm_nft_loss", "mm_schedules_and_stats")
def nft(
    *, steps: int = 10, group: int = 24, levels_per_sample: int | None = None, beta: float = 1.0,
    kl: float = 1e-4, share: Literal["batch", "sample"] = "sample",
    mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all",
    decay: tuple[int, float, float] = (0, 0.001, 0.5), solver: Solver | None = None,
    credit: CreditName = "group", blend: float = 0.0,
) -> Algorithm:  # fmt: skip
    """DiffusionNFT, arXiv:2509.16117. SD3.5-M: 10 steps of DPM-Solver++(2M), group 24, all levels
    of the grid except one per sample (`levels_per_sample=None`), beta 1, KL 1e-4, advantages
    clipped at 5; the sampling policy is an average with decay min(most, slope (s - flat)) at
    optimizer step s, 0 before flat: `decay` is (flat, slope, most). OCR: beta 0.1, 2 updates, decay
    (75, 0.0075, 0.999).

    `credit` and `blend` are as in `flow_grpo`.

    Differences: none in the loss; the level that a sample leaves out comes from keyed noise, not
    from a global generator. `share="batch"` gives all samples the same levels, in one order.

    levels_per_sample  noise levels of each sample at which the loss is computed, at least 1; null
                       is all of the grid but one. More make the gradient less noisy, and training
                       slower
    beta               share of the trained velocity in the two that are compared with the sample,
                       (1 - beta) v_old + beta v and (1 + beta) v_old - beta v, above 0; the best
                       velocity differs from v_old in proportion to 1 / beta, so smaller makes
                       larger updates
    share              whether each `sample` has levels of its own, or all samples of the `batch`
                       have the same, in one order
    mode               advantages that are used: `all`; `positive_only` or `negative_only`, the
                       others being 0; `one_only`, 1 where positive and 0 elsewhere; `binary`, their
                       sign
    """
    levels = steps - 1 if levels_per_sample is None else levels_per_sample
    flat, slope, most = decay
    return Algorithm(
        steps=steps,
        plan=Ode(group, solver or DPM2M()),
        advantage=Estimator((*credit_chain(credit, Standardize("batch", blend=blend)), Clip())),
        likelihood=Matching(levels, PermutedGrid(), share=share),
        loss=NFT(beta, mode=mode, anchors=anchors(kl)),
        averages=(Average("trailing", Decay(flat=flat, slope=slope, most=most)),),
        behaviour="trailing",
        tracker=credit_tracker(credit),
    )


@rests_on("arrays", "mm_diffusion_dpo")
def dpo(
    *, steps: int = 10, group: int = 24, levels_per_sample: int = 4, beta: float = 100.0,
    weight: WeightingName = "uniform", solver: Solver | None = None,
) -> Algorithm:  # fmt: skip
    """Online Diffusion-DPO (arXiv:2311.12908) on a group's best and worst sample, at the same noise
    and level, in velocity space as in Flow-GRPO's repository: beta 100. Diffusion-DPO's 2000 to
    5000 are for noise predictions: `weight="epsilon"`.

    Differences: a group with a tie is masked, where the codes train on a sample against itself; the
    reference stays the frozen initial policy; levels are uniform and stratified, and their number
    is our choice.

    beta  inverse temperature of the preference, above 0; with a larger one a pair that is ranked
          right already stops training sooner, which keeps the policy nearer to the initial one
    """
    return Algorithm(
        steps=steps,
        plan=Ode(group, solver or Euler()),
        advantage=Estimator((BestWorst(),)),
        likelihood=Matching(levels_per_sample, Uniform(), weighting(weight), paired=True),
        loss=Preference(beta / 2),
    )


@rests_on("code")
def rwr(
    *, steps: int = 10, group: int = 8, levels_per_sample: int = 4, rate: float = 0.5,
    anchor: float = 1.0, over: Literal["group", "batch"] = "group", solver: Solver | None = None,
) -> Algorithm:  # fmt: skip
    """Reward-weighted flow matching: ORW-CFM-W2, arXiv:2502.06061. Weights exp(rate reward) with
    rate 0.5 (called a temperature in the code, but multiplied), plus 1 times |v - v_ref|^2, which
    keeps the samples from collapsing.

    Differences: weights have mean 1 over a prompt's group (or the batch), where the code's loss
    grows with the rewards; noise and data are paired at random, not by optimal transport; steps,
    group and levels are our choice.

    rate    a sample's weight is exp(rate times its reward), over the mean weight; above 0, larger
            is greedier
    anchor  weight of |v - v_ref|^2, the distance from the initial policy's velocity, at least 0;
            larger keeps samples more different from each other
    over    samples over which weights have mean 1: a prompt's `group`, or the `batch`
    """
    if rate == 0:
        raise UserError(
            "rate is 0, so all samples have the weight 1 and no reward is read: raise it"
        )
    return Algorithm(
        steps=steps,
        plan=Ode(group, solver or Euler()),
        advantage=Estimator((Sum(), Exponential(rate, over))),
        likelihood=Matching(levels_per_sample),
        loss=Weighted(anchors(anchor)),
    )
