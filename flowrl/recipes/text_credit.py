"""Recipes for language models that differ in credit: baselines, success rates, trees.

The common rules and settings of `flowrl/recipes/text.py` apply here too.
"""

from functools import partial
from typing import Literal

from flowrl.algorithm import Algorithm
from flowrl.credit.comparisons import BestWorst
from flowrl.credit.success import BetaNormalize, MaxRL, PassAtK
from flowrl.credit.trackers import StartValues
from flowrl.credit.trees import GlobalLocal
from flowrl.credit.turns import Baseline, GreedyBaseline, LengthBaseline, WhitenTokens
from flowrl.credit.values import Transform
from flowrl.likelihoods.token import Token
from flowrl.losses.off_policy import AdvantageRegression
from flowrl.losses.preference import Preference
from flowrl.losses.ratio import Surrogate
from flowrl.losses.token import Reinforce
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors
from flowrl.recipes.text import (
    GROUP,
    GROUP_MEAN,
    KlPlace,
    penalty,
    sampling_settings,
    texts,
)
from samplers.completions import Completions, Segments


@rests_on("ours")
@sampling_settings()
def text_tree(
    *, length: int = 1024, roots: int = 4, branch: int = 2, at: tuple[int, ...] = (256,),
    clip: float = 0.2, credit: Literal["depth", "local"] = "depth",
) -> Algorithm:  # fmt: skip
    """Completions that branch after `at` tokens, so that each segment gets its own credit: a node's
    value is the mean of its completions.

    The numbers are our choice. A token that completions share is in the loss once.

    roots   completions per prompt that begin at the prompt, at least 1
    branch  completions that continue from each cut, at least 1
    at      numbers of tokens after which completions branch, increasing and below `length`
    credit  `depth`: nodes of one depth are compared, as in BranchGRPO (arXiv:2509.06040); `local`:
            a node is compared with its draw and its parent, TreeRL (arXiv:2506.11902)
    """
    rule: Transform = GROUP if credit == "depth" else GlobalLocal()
    return texts(length, Segments(roots, branch, at), (rule,), Surrogate(clip, clip))


@rests_on("paper")
@sampling_settings()
def text_reinforce(
    *, length: int = 1024, group: int = 8, clip: float = 0.2, kl: float = 0.0,
    kl_in: KlPlace = "loss", baseline: bool = True,
) -> Algorithm:  # fmt: skip
    """REINFORCE++ with a baseline, arXiv:2501.03262: the group's mean is subtracted, then
    advantages are whitened over all tokens of the batch. The paper's other form, `baseline: false`,
    only whitens, and subtracts the KL from the reward.

    kl_in     `loss`: a loss term with the k2 estimate, whose gradient is that of KL(new | start).
              `reward`, as in the paper: `kl` times log(policy / start) over a token and all later
              ones is subtracted from the outcome, so that each token has its own credit, before
              whitening; with `baseline`, after the group's mean
    baseline  whether the group's mean is subtracted before whitening; without it, advantages are
              only whitened
    """
    mean = (GROUP_MEAN,) if baseline else ()
    loss = Surrogate(clip, clip, anchors=anchors(kl if kl_in == "loss" else 0.0))
    credit = (*mean, *penalty(kl, kl_in, each=True), WhitenTokens())
    return texts(length, group, credit, loss, Token(kl_form="k2"))


@rests_on("paper")
@sampling_settings(temperature=0.6)
def text_opo(*, length: int = 4096, group: int = 16) -> Algorithm:
    """OPO, arXiv:2505.23585: one exact on-policy step, the baseline weighted by length, no clip, no
    KL. Set `train.updates: 1`, which its proof requires."""
    return texts(length, group, (LengthBaseline(),), Reinforce())


@rests_on("arrays", "mm_adv_misc")
@sampling_settings()
def text_maxrl(*, length: int = 4096, group: int = 16, clip: float = 0.2) -> Algorithm:
    """MaxRL, arXiv:2602.02710: advantages are divided by the group's mean, which follows the
    gradient of the log-likelihood of success and gives hard prompts more weight. Rewards are at
    least 0."""
    return texts(length, group, (MaxRL(),), Surrogate(clip, clip))


@rests_on("arrays", "mm_adv_misc")
@sampling_settings()
def text_pass_at_k(
    *, length: int = 4096, group: int = 16, k: int = 4,
    form: Literal["leave_one_out", "analytic"] = "analytic", clip: float = 0.2,
) -> Algorithm:  # fmt: skip
    """Credit for the probability that at least one of k samples succeeds. Rewards are 0 or 1.

    group  samples per prompt, at least `k`; more make advantages less noisy, and cost that many
           more samples
    k      samples of which at least one shall succeed, at least 1 and at most `group`; larger
           rewards variety, 1 is the plain success rate
    form   `analytic`: pass@k training, arXiv:2508.10751; `leave_one_out`: PKPO, arXiv:2505.15201,
           which needs `k` other samples
    """
    return texts(length, group, (PassAtK(k, form),), Surrogate(clip, clip))


@rests_on("arrays", "mm_adv_misc")
@sampling_settings()
def text_bnpo(
    *, length: int = 1024, group: int = 16, most: float = 10.0, clip: float = 0.2
) -> Algorithm:
    """BNPO, arXiv:2506.02864: advantages are divided by the density of a Beta distribution fitted
    to the success rates of the batch's prompts. Rewards are in 0..1.

    Weights are bounded by 10 (1e6 in the released code). The variance of the rates is divided by n,
    as in the paper; the released code divides by n - 1.

    most  largest weight of a prompt, above 0; larger trains more on prompts that almost always or
          never succeed
    """
    loss = Surrogate(clip, clip, denominator="rows")
    return texts(length, group, (BetaNormalize(most),), loss)


@rests_on("code")
@sampling_settings()
def text_a_star_po(
    *, length: int = 1024, group: int = 1, beta: float = 1e-3, soft: float | None = 0.5,
    samples: int = 8, solvable: bool = True,
) -> Algorithm:  # fmt: skip
    """A*-PO, arXiv:2505.20686: the log-ratio of a completion to the initial policy is regressed on
    its reward minus V*, the soft maximum over 8 samples of the initial policy, drawn at a prompt's
    first use. Training uses one completion per prompt.

    The authors and TRL draw all initial samples before training. The length is our choice. Not
    with `model.server` or `workers`.

    group     completions per prompt, at least 1; they are not compared
    beta      weight of the KL penalty in the objective (beta2), above 0; larger keeps the policy
              nearer to the initial one
    soft      temperature of V* (beta1), above 0; smaller is nearer to the best of the initial
              samples, null is their mean
    samples   samples of the initial policy for V*, drawn at a prompt's first use, at least 1; more
              make it more exact
    solvable  leaves out prompts that the initial policy never solves, like the authors' filter
    """
    tracker = partial(StartValues, samples, soft, solvable)
    loss, likelihood = AdvantageRegression(beta), Token("product")
    return texts(length, group, (Baseline(),), loss, likelihood, tracker)


@rests_on("paper")
@sampling_settings()
def text_dpo(*, length: int = 512, group: int = 8, beta: float = 0.1) -> Algorithm:
    """Online DPO, arXiv:2305.18290 on the policy's own samples: the group's best against its worst,
    beta 0.1. A group with a tie has no pair.

    beta  inverse temperature of the preference, above 0; larger keeps the policy nearer to the
          initial one
    """
    return texts(length, group, (BestWorst(),), Preference(beta), Token(paired=True))


@rests_on("paper")
@sampling_settings()
def text_remax(
    *, length: int = 512, group: int = 1, clip: float = 0.2, kl: float = 0.0,
    kl_in: KlPlace = "loss",
) -> Algorithm:  # fmt: skip
    """ReMax, arXiv:2310.10505: one completion per prompt, treated as one action; its baseline is
    the reward of the greedy completion of the same prompt, which is drawn and scored but not
    trained on.

    With one update per iteration the clip never acts, and this is the paper's estimator. `group`
    counts the sampled completions; the logged `reward` also includes the greedy ones. The length is
    our choice.

    group  completions per prompt beside the greedy one, at least 1; they are not compared with each
           other
    kl_in  `reward`, as in the paper: `kl` times log(policy / start) of the whole completion is
           subtracted from its reward, not from the baseline's; `loss`: `kl` is a term of the loss
    """
    in_loss = anchors(kl if kl_in == "loss" else 0.0)
    loss = Surrogate(clip, clip, anchors=in_loss, denominator="rows")
    credit = (GreedyBaseline(group + 1), *penalty(kl, kl_in))
    return texts(length, Completions(group, greedy=True), credit, loss, Token("product"))
