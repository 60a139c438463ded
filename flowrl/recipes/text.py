"""Recipes for language models: token losses and ratios. Recipes that differ in credit are in
`text_credit`.

Common to all: `length` is the maximum number of tokens of a completion; log-probabilities are those
of the sampling distribution, including temperature, top-p, top-k and min-p; the stop token is
trained like any other; completions with advantage 0 stay in the batch; means are over the whole
optimizer step. Where a paper gives no number, and for most lengths, the number is our choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import update_wrapper
from inspect import Parameter, signature
from typing import Any, Literal

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Estimator, GroupBaseline, LeaveOneOut, Standardize
from flowrl.credit.selection import DropFlat
from flowrl.credit.trackers import NoTracker, Tracker
from flowrl.credit.turns import Penalize
from flowrl.credit.values import Transform
from flowrl.errors import UserError
from flowrl.likelihoods.token import Token
from flowrl.losses.base import Objective
from flowrl.losses.off_policy import REC
from flowrl.losses.ratio import Surrogate
from flowrl.losses.token import CISPO, GMPO, SAPO, VESPO
from flowrl.losses.weights import HighEntropy, OffPolicyMask
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors
from samplers.completions import Completions, TextPlanner

Cut = Literal["train", "mask"]
KlPlace = Literal["loss", "reward"]
ClipSides = Literal["one_side", "two_side", "ring", "all"]
GROUP = Standardize("group", correction=1)
GROUP_MEAN = Standardize(scale=None)
OVER_BATCH = Standardize("batch", correction=1, centre="batch")


def sampling_settings(
    temperature: float = 1.0, top_p: float = 1.0, name: str | None = None
) -> Callable[[Callable[..., Algorithm]], Callable[..., Algorithm]]:
    """Add the sampling settings temperature, top_p, top_k and min_p to a recipe, and name it."""
    rule = {"temperature": temperature, "top_p": top_p, "top_k": 0, "min_p": 0.0}

    def decorate(recipe: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        def whole(**settings: Any) -> Algorithm:
            chosen = {name: settings.pop(name, value) for name, value in rule.items()}
            algorithm = recipe(**settings)
            plan: Any = algorithm.plan
            return replace(algorithm, plan=replace(plan, **chosen))

        update_wrapper(whole, recipe)
        whole.__name__ = name or recipe.__name__
        of_recipe = signature(recipe)
        more = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=value, annotation=type(value))
            for name, value in rule.items()
        ]
        whole.__dict__["__signature__"] = of_recipe.replace(
            parameters=[*of_recipe.parameters.values(), *more]
        )
        return whole

    return decorate


def texts(
    length: int, plan: TextPlanner | int, credit: Sequence[Transform], loss: Objective,
    likelihood: Token = Token(), tracker: Callable[[], Tracker] = NoTracker,
) -> Algorithm:  # fmt: skip
    """The parts that text recipes share. A number means a group of independent completions."""
    planner = Completions(plan) if isinstance(plan, int) else plan
    return Algorithm(length, planner, Estimator(tuple(credit)), likelihood, loss, tracker=tracker)


def penalty(kl: float, kl_in: KlPlace, each: bool = False) -> tuple[Transform, ...]:
    """The transform that subtracts the KL from the reward, or none if the KL is in the loss."""
    if kl_in == "loss":
        return ()
    if kl <= 0:
        raise UserError(f"kl_in: reward needs kl above 0, not {kl}")
    return (Penalize(kl, each),)


@rests_on("ours")
@sampling_settings(name="text")
def text_mixture(*, length: int = 1024, group: int = 16, kl: float = 0.0) -> Algorithm:
    """A plain starting point for your own mixture; the numbers are our choice. Like every recipe it
    takes `plan`, `advantage`, `likelihood` and `loss` by name: GSPO's ratio (arXiv:2507.18071) with
    the advantage of Dr. GRPO (arXiv:2503.20783) and DAPO's range is

        likelihood: {ratio: sequence}
        advantage: {name: standardize, scale: null}
        loss: {low: 0.2, high: 0.28}

    Omitted settings have the values of the table below; a part of another name keeps the settings
    that both have in common, such as the KL in `loss: {name: cispo, high: 5.0}`.
    """
    return texts(length, group, (GROUP,), Surrogate(0.2, 0.2, anchors=anchors(kl)))


@rests_on("arrays", "mm_trl_grpo_loss_1_16_0", "mm_trl_advantages_1_16_0")
@sampling_settings()
def text_grpo(
    *, length: int = 1024, group: int = 64, clip: float = 0.2, kl: float = 0.04, cut: Cut = "train"
) -> Algorithm:
    """GRPO, arXiv:2402.03300: the group's mean and std, a clip range of 0.2, KL 0.04 to the initial
    policy (k3), the mean over each completion's tokens and then over completions. 64 completions
    per prompt, 1,024 tokens.

    The std divides by n - 1, as in TRL and verl, which add 1e-4 and 1e-6 to it."""
    loss = Surrogate(clip, clip, anchors=anchors(kl), denominator="rows")
    return texts(length, group, (GROUP,), loss, Token(cut=cut))


@rests_on("arrays", "mm_trl_rloo_gmpo_gspotoken")
@sampling_settings()
def text_rloo(
    *, length: int = 512, group: int = 4, clip: float = 0.2, kl: float = 0.0,
    kl_in: KlPlace = "loss",
) -> Algorithm:  # fmt: skip
    """REINFORCE with the mean of the other completions as baseline, arXiv:2402.14740: 4 completions
    per prompt, each treated as one action, so that the ratio is the product over its tokens.

    With one update per iteration the clip never acts, and this is the paper's estimator.

    kl_in  `reward`, as in the paper: `kl` times log(policy / start) of the whole completion is
           subtracted from its reward, before the others' mean; `loss`: `kl` is a term of the loss
    """
    in_loss = anchors(kl if kl_in == "loss" else 0.0)
    loss = Surrogate(clip, clip, anchors=in_loss, denominator="rows")
    credit = (*penalty(kl, kl_in), LeaveOneOut())
    return texts(length, group, credit, loss, Token("product"))


@rests_on("arrays", "mm_trl_grpo_loss_1_16_0")
@sampling_settings()
def text_dr_grpo(*, length: int = 3000, group: int = 8, clip: float = 0.2) -> Algorithm:
    """Dr. GRPO, arXiv:2503.20783: no division by the group's std, sums over tokens divided by
    the constant `length`, no KL. 8 completions per prompt, 3,000 tokens.

    length  most tokens of a completion, at least 1, by which sums over tokens are divided; longer
            ones are cut off
    """
    return texts(length, group, (GROUP_MEAN,), Surrogate(clip, clip, denominator=length))


@rests_on("arrays", "mm_trl_grpo_loss_1_16_0")
@sampling_settings()
def text_dapo(
    *, length: int = 20480, group: int = 16, low: float = 0.2, high: float = 0.28,
    cut: Cut = "mask",
) -> Algorithm:  # fmt: skip
    """DAPO, arXiv:2503.14476: the clip range is wider above (0.28), every token of the batch has
    the same weight, no KL, completions that were cut off are masked, and groups with equal scores
    are left out. 16 completions per prompt, 20,480 tokens.

    The paper draws new prompts in place of dropped groups (dynamic sampling), which is the setting
    `budget.flat: resample`; the recipe alone only drops them. Its soft penalty for long completions
    is the reward `length`."""
    return texts(length, group, (DropFlat(), GROUP), Surrogate(low, high), Token(cut=cut))


@rests_on("arrays", "mm_trl_grpo_loss_1_16_0", "mm_trl_rloo_gmpo_gspotoken")
@sampling_settings()
def text_gspo(
    *, length: int = 4096, group: int = 16, low: float = 3e-4, high: float = 4e-4,
    ratio: Literal["sequence", "sequence_token"] = "sequence",
) -> Algorithm:  # fmt: skip
    """GSPO, arXiv:2507.18071: one ratio per completion, the geometric mean of its tokens',
    clipped at 3e-4 below and 4e-4 above. `ratio: sequence_token` is GSPO-token.

    The paper gives neither group nor length: 16 and 4,096 are our choice.

    ratio  ratio of a completion: `sequence`, the geometric mean of its tokens'; `sequence_token`,
           the same value with each token's own gradient (GSPO-token)
    """
    loss = Surrogate(low, high, denominator="rows")
    return texts(length, group, (GROUP,), loss, Token(ratio))


@rests_on("arrays", "mm_trl_grpo_loss_1_16_0")
@sampling_settings()
def text_cispo(*, length: int = 4096, group: int = 16, high: float = 5.0) -> Algorithm:
    """CISPO of MiniMax-M1, arXiv:2506.13585, with the bound 5 on the ratio of ScaleRL,
    arXiv:2510.13786: no token's gradient is lost, only its weight is bounded.

    ScaleRL divides by the batch's std and drops groups without spread; here the group's std.

    high  largest weight of a token's gradient, a bound on the ratio p_new / p_old itself, above 0;
          below 1 it would scale down every gradient
    """
    return texts(length, group, (GROUP,), CISPO(high))


@rests_on("arrays", "mm_trl_grpo_loss_1_16_0")
@sampling_settings()
def text_forking(
    *, length: int = 20480, group: int = 16, low: float = 0.2, high: float = 0.28,
    share: float = 0.2, entropy: float = 0.0, off_policy: float | None = None,
) -> Algorithm:  # fmt: skip
    """DAPO's clip range on the 20 % of the iteration's tokens with the highest entropy,
    arXiv:2506.01939. Unlike `text_dapo` it keeps groups with equal scores, and trains on
    completions that were cut off.

    share       share of the iteration's tokens that is trained, those of the highest entropy, in
                (0, 1]
    entropy     weight of a bonus on the mean entropy of tokens, at least 0; larger keeps
                completions more varied
    off_policy  leaves out bad completions whose mean log-probability has fallen by more than this,
                in nats per token, above 0 (DeepSeek-V3.2, arXiv:2512.02556); null keeps all
    """
    off = () if off_policy is None else (OffPolicyMask(off_policy),)
    loss = Surrogate(low, high, weights=(HighEntropy(share), *off), entropy=entropy)
    return texts(length, group, (GROUP,), loss, Token(entropy=True))


@rests_on("arrays", "mm_trl_grpo_loss_1_16_0")
@sampling_settings()
def text_sapo(
    *, length: int = 4096, group: int = 16, positive: float = 1.0, negative: float = 1.05
) -> Algorithm:
    """SAPO, arXiv:2511.20347: a soft clip, softer for good samples than for bad ones.

    positive  steepness of the soft clip for good samples, above 0; with a larger one gradients fade
              at smaller changes of the ratio
    negative  the same for bad samples, above 0; larger than `positive` lets them move less
    """
    return texts(length, group, (GROUP,), SAPO(positive, negative))


@rests_on("arrays", "mm_trl_grpo_loss_1_16_0")
@sampling_settings()
def text_vespo(*, length: int = 4096, group: int = 16) -> Algorithm:
    """VESPO, arXiv:2602.10693: each completion is weighted by a smooth function of its whole
    ratio."""
    return texts(length, group, (GROUP,), VESPO())


@rests_on("arrays", "mm_trl_rloo_gmpo_gspotoken")
@sampling_settings()
def text_gmpo(
    *, length: int = 3000, group: int = 8, clip: float = 0.4, kl: float = 0.0
) -> Algorithm:
    """GMPO, arXiv:2507.20673: the geometric mean of a completion's ratios, each clipped at e^-0.4
    or e^0.4 on the side where further change would increase the objective.

    clip  clip range of each token's log-ratio, above 0: e^clip above for good completions and
          e^-clip below for bad ones; smaller limits each update more
    """
    return texts(length, group, (GROUP,), GMPO(clip, clip, anchors=anchors(kl)))


@rests_on("paper")
@sampling_settings()
def text_rec(
    *, length: int = 1024, group: int = 8, keep: ClipSides = "one_side", low: float = 0.2,
    high: float = 0.2, pull: float = 0.0, shift: float = 0.0,
) -> Algorithm:  # fmt: skip
    """Group-relative REINFORCE for samples of older policies, arXiv:2509.24203: the gradient of A
    log p, without the ratio as a factor, wherever the clip range allows it.

    The advantage is the reward minus the group's mean and the shift, without a division. The length
    and the group size are our choice.

    keep   tokens that are trained: `one_side` of the clip range, by the sign of the advantage
           (REC-OneSide); inside both (`two_side`); also far outside on the harmless side (`ring`);
           or `all`, which with `pull` is OPMD of Kimi k1.5, arXiv:2501.12599, and with `shift:
           -0.1` AsymRE, arXiv:2506.20520
    low    clip range of the ratio below 1: tokens down to 1 - low are trained, above 0 and at most
           0.6; no effect with `keep: all`
    high   clip range of the ratio over 1: tokens up to 1 + high are trained, above 0 and at most 2;
           no effect with `keep: all`
    pull   weight of log(r)^2, which pulls back to the policy that sampled, at least 0
    shift  any number, which is subtracted from the advantage beside the group's mean; below 0 good
           completions count more than bad ones
    """
    loss = REC(keep, low, high, pull=pull)
    return texts(length, group, (GroupBaseline(shift=shift),), loss)


@rests_on("arrays", "mm_trl_grpo_loss_1_16_0")
@sampling_settings()
def text_luspo(
    *, length: int = 4096, group: int = 16, low: float = 2e-3, high: float = 2.5e-3
) -> Algorithm:
    """LUSPO, arXiv:2602.05261: GSPO with completions weighted by their length, so that tokens of
    long and short completions have the same weight. Clip range 2e-3 below, 2.5e-3 above."""
    loss = Surrogate(low, high, denominator="sequences")
    return texts(length, group, (GROUP,), loss, Token("sequence"))
