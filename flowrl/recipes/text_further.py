"""More recipes of language models: other losses, other baselines, other credit.

What all have in common, and `length`, is said in `flowrl/recipes/text.py`. Where a paper does not
state a number it is ours, and so are the lengths.
"""

from functools import partial
from typing import Literal

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Estimator, Standardize
from flowrl.credit.comparisons import BestWorst, ParentDifference
from flowrl.credit.success import BetaNormalize, MaxRL, PassAtK, RiskPO
from flowrl.credit.trackers import PromptValues, ScoreQuantiles
from flowrl.credit.trees import GlobalLocal
from flowrl.credit.turns import Baseline, LengthBaseline, WhitenTokens
from flowrl.likelihoods.token import Token
from flowrl.losses.ratio import Preference, Surrogate
from flowrl.losses.token import CISPO, GMPO, GPPO, SAPO, VESPO, Reinforce
from flowrl.losses.weights import HighEntropy, OffPolicyMask
from flowrl.recipes.text import KLPlacement, anchors, penalised
from samplers.completions import Completions, Segments

GROUP = Estimator((Standardize("group", correction=1),))


def text_cispo(
    *, length: int = 4096, group: int = 16, high: float = 5.0, temperature: float = 1.0,
    top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """CISPO of MiniMax-M1, arXiv:2506.13585, with the bound 5 on the ratio of ScaleRL,
    arXiv:2510.13786: no token's gradient is lost, only its weight is bounded.

    ScaleRL divides by the batch's std and drops groups without spread; here the group's std.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=GROUP,
        likelihood=Token(),
        loss=CISPO(high),
    )


def text_forking(
    *, length: int = 20480, group: int = 16, low: float = 0.2, high: float = 0.28,
    share: float = 0.2, entropy: float = 0.0, off_policy: float | None = None,
    temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """Forking tokens, arXiv:2506.01939: DAPO's clip range and mean over tokens, on the fifth of the
    iteration's tokens where the policy was least certain.

    Differences: groups without spread stay in the denominator and completions that were cut off are
    trained on, where the paper has DAPO's dynamic sampling and length penalty: add
    `budget.flat: resample` and the reward `length`.

    entropy     a bonus of this times the mean entropy of tokens
    off_policy  leaves out bad completions whose mean log-probability fell by more (DeepSeek-V3.2,
                arXiv:2512.02556)
    """
    stale = () if off_policy is None else (OffPolicyMask(off_policy),)
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=GROUP,
        likelihood=Token(entropy=True),
        loss=Surrogate(low, high, weights=(HighEntropy(share), *stale), entropy=entropy),
    )


def text_sapo(
    *, length: int = 4096, group: int = 16, positive: float = 1.0, negative: float = 1.05,
    temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """SAPO, arXiv:2511.20347: a soft clip, softer for good samples than for bad ones."""
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=GROUP,
        likelihood=Token(),
        loss=SAPO(positive, negative),
    )


def text_vespo(
    *, length: int = 4096, group: int = 16, temperature: float = 1.0, top_p: float = 1.0
) -> Algorithm:
    """VESPO, arXiv:2602.10693: each completion weighs by a smooth function of its whole ratio."""
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=GROUP,
        likelihood=Token(),
        loss=VESPO(),
    )


def text_gmpo(
    *, length: int = 3000, group: int = 8, clip: float = 0.4, kl: float = 0.0,
    temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """GMPO, arXiv:2507.20673: the geometric mean of a completion's ratios, each of which is clipped
    at e^-0.4 and e^0.4 on the side where moving on would pay.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=GROUP,
        likelihood=Token(),
        loss=GMPO(clip, clip, anchors=anchors(kl)),
    )


def text_gppo(
    *, length: int = 4096, group: int = 8, low: float = 0.2, high: float = 0.28,
    keep_low: float = 1.0, keep_high: float = 1.0, temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """GPPO of Klear-Reasoner, arXiv:2508.07629: clipped tokens keep a bounded gradient. The authors
    later advise 0.25 to 0.5 of it, or the high side only, where entropy collapses.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=GROUP,
        likelihood=Token(),
        loss=GPPO(low, high, keep_low, keep_high),
    )


def text_luspo(
    *, length: int = 4096, group: int = 16, low: float = 2e-3, high: float = 2.5e-3,
    temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """LUSPO, arXiv:2602.05261: GSPO whose completions weigh by their length, so that long ones are
    not taught less a token. Ranges 2e-3 below, 2.5e-3 above.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=GROUP,
        likelihood=Token(ratio="sequence"),
        loss=Surrogate(low, high, denominator="sequences"),
    )


def text_reinforce(
    *, length: int = 1024, group: int = 8, clip: float = 0.2, kl: float = 0.0,
    kl_in: KLPlacement = "loss", baseline: bool = True, temperature: float = 1.0, top_p: float =
    1.0,
) -> Algorithm:  # fmt: skip
    """REINFORCE++ with a baseline, arXiv:2501.03262: the group's mean is taken off, then advantages
    are whitened over all tokens of the batch. The paper's other form, `baseline: false`, whitens
    only, and takes its KL off the reward.

    kl_in  loss    a term by the k2 estimate, whose gradient is that of KL(new | start)
           reward  as in the paper: `kl` times log(policy / start) of a token and of all after it is
                   taken off the outcome, so that each token has credit of its own, and then
                   whitened with it; with `baseline`, after the group's mean
    """
    taken, kept = penalised(kl, kl_in, each=True)
    centre = (Standardize(scale=None),) if baseline else ()
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=Estimator((*centre, *taken, WhitenTokens())),
        likelihood=Token(kl_form="k2"),
        loss=Surrogate(clip, clip, anchors=kept),
    )


def text_opo(
    *, length: int = 4096, group: int = 16, temperature: float = 0.6, top_p: float = 1.0
) -> Algorithm:
    """OPO, arXiv:2505.23585: one exact on-policy step, the baseline weighed by length, no clip, no
    KL. Set `train.updates: 1`, as its proof asks for.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=Estimator((LengthBaseline(),)),
        likelihood=Token(),
        loss=Reinforce(),
    )


def text_maxrl(
    *, length: int = 4096, group: int = 16, clip: float = 0.2, temperature: float = 1.0,
    top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """MaxRL, arXiv:2602.02710: advantages are divided by the group's mean, the gradient of the
    likelihood of success, so that hard prompts weigh more. Rewards are at least 0.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=Estimator((MaxRL(),)),
        likelihood=Token(),
        loss=Surrogate(clip, clip),
    )


def text_pass_at_k(
    *, length: int = 4096, group: int = 16, k: int = 4,
    form: Literal["leave_one_out", "analytic"] = "analytic", clip: float = 0.2,
    temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """Credit for the chance that one of k samples succeeds. Rewards are 0 or 1.

    form  analytic       pass@k training, arXiv:2508.10751
          leave_one_out  PKPO, arXiv:2505.15201
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=Estimator((PassAtK(k, form),)),
        likelihood=Token(),
        loss=Surrogate(clip, clip),
    )


def text_bnpo(
    *, length: int = 1024, group: int = 16, most: float = 10.0, clip: float = 0.2,
    temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """BNPO, arXiv:2506.02864: advantages are divided by the density of a Beta law that is fitted to
    the success rates of the batch's prompts. Rewards are in 0..1.

    Weights are bounded by 10; the released code bounds them by 1e6.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=Estimator((BetaNormalize(most),)),
        likelihood=Token(),
        loss=Surrogate(clip, clip, denominator="rows"),
    )


def text_riskpo(
    *, length: int = 1024, group: int = 8, bundle: int = 5, low: float = 0.2, high: float = 0.8,
    mix: float = 1.5, clip: float = 0.2, temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """RiskPO, arXiv:2510.00911: scores of bundles of prompts are judged by where they lie between
    two quantiles that are tracked over iterations, and by how far they fall below the lower one.
    `prompts.per_iteration` must be a multiple of `bundle`.

    The published advantage is never positive: only differences teach. So the batch's mean is taken
    off here, and its std divided by, as the authors' option with a std does within bundles.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=Estimator(
            (RiskPO(bundle, low, high, mix), Standardize("batch", 1, centre="batch"))
        ),
        likelihood=Token(),
        loss=Surrogate(clip, clip),
        tracker=partial(ScoreQuantiles, bundle, low, high),
    )


def text_stream(
    *, length: int = 1024, group: int = 1, keep: float = 0.9, uncertain: bool = True,
    clip: float = 0.2, temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """Single-stream policy optimisation, arXiv:2509.13232: one completion a prompt, compared with
    what its prompt is known to score, then whitened over the batch. Prompts that could go either
    way come more often (`uncertain`). Scores in 0..1.

    How fast a prompt's past fades is constant here: see `flowrl.credit.trackers.PromptValues`.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=Estimator((Baseline(), Standardize("batch", 1, centre="batch"))),
        likelihood=Token(),
        loss=Surrogate(clip, clip),
        tracker=partial(PromptValues, keep, uncertain=uncertain),
    )


def text_dpo(
    *, length: int = 512, group: int = 8, beta: float = 0.1, temperature: float = 1.0,
    top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """Online DPO, arXiv:2305.18290 on own samples: the group's best against its worst, beta 0.1.

    A group that ties has no pair.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=Estimator((BestWorst(),)),
        likelihood=Token(paired=True),
        loss=Preference(beta),
    )


def text_spo_tree(
    *, length: int = 1024, roots: int = 6, branch: int = 6, at: tuple[int, ...] = (256, 512),
    clip: float = 0.2, temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """SPO-tree, arXiv:2505.23564: a segment's advantage is its node's value less the parent's, in
    trees that branch 6 times at each level.

    Published: only tokens of probability below 0.9 in a segment are trained. Here all are.
    """
    return Algorithm(
        steps=length,
        plan=Segments(roots, branch, at, temperature, top_p),
        advantage=Estimator((ParentDifference(),)),
        likelihood=Token(),
        loss=Surrogate(clip, clip),
    )


def text_tempo(
    *, length: int = 1024, roots: int = 4, branch: int = 2, at: tuple[int, ...] = (256,),
    clip: float = 0.2, temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """TEMPO, arXiv:2509.18314: the group's advantage, plus what a branch gained over its parent.

    The paper finds prefixes that completions happen to share; here they share them by plan. Its
    sum over the completions that pass a token is on the token once.
    """
    return Algorithm(
        steps=length,
        plan=Segments(roots, branch, at, temperature, top_p),
        advantage=Estimator((GlobalLocal(power=1.0, scaled=True),)),
        likelihood=Token(),
        loss=Surrogate(clip, clip),
    )
