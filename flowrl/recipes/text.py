"""Recipes of language models: the same credit and losses on tokens. Defaults are published numbers.

`length` is the most tokens of a completion. Common to all: log-probabilities are those of the
sampler's own rule, temperature and top-p included; the stop token is trained like any other;
completions of advantage 0 stay in the batch; means are over the whole optimizer step.
"""

from typing import Literal

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Estimator, LeaveOneOut, Standardize
from flowrl.credit.selection import DropFlat
from flowrl.credit.trees import GlobalLocal
from flowrl.credit.turns import Penalize
from flowrl.errors import UserError
from flowrl.likelihoods.token import Token
from flowrl.losses.base import Anchor
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.grpo import anchors
from samplers.completions import Completions, Segments

KLPlacement = Literal["loss", "reward"]


def penalised(
    kl: float, place: KLPlacement, each: bool = False
) -> tuple[tuple[Penalize, ...], tuple[Anchor, ...]]:
    """A KL to the start of weight `kl` as a part of credit, or as a term of the loss."""
    if place == "loss":
        return (), anchors(kl)
    if kl <= 0:
        raise UserError(f"kl_in: reward takes kl off the reward, and kl is {kl}: set it above 0")
    return (Penalize(kl, each),), ()


def text_grpo(
    *, length: int = 1024, group: int = 64, clip: float = 0.2, kl: float = 0.04,
    temperature: float = 1.0, top_p: float = 1.0, cut: Literal["train", "mask"] = "train",
) -> Algorithm:  # fmt: skip
    """GRPO, arXiv:2402.03300: the group's mean and std, a clip range of 0.2, KL 0.04 to the start
    (k3), the mean over each completion's tokens and then over completions. 64 completions a
    prompt, 1,024 tokens.

    The std divides by n - 1, as in TRL and verl, which add 1e-4 and 1e-6 to it.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=Estimator((Standardize("group", correction=1),)),
        likelihood=Token(cut=cut),
        loss=Surrogate(clip, clip, anchors=anchors(kl), denominator="rows"),
    )


def text_rloo(
    *, length: int = 512, group: int = 4, clip: float = 0.2, kl: float = 0.0,
    kl_in: KLPlacement = "loss", temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """REINFORCE with the mean of the others as baseline, arXiv:2402.14740: 4 completions a prompt,
    each one action, so that the ratio is the product over its tokens.

    With one update an iteration the clip never acts, and this is the paper's estimator.

    kl_in  reward  as in the paper: `kl` times log(policy / start) of the whole completion is taken
                   off its reward, before the others' mean
           loss    `kl` is a term of the loss
    """
    taken, kept = penalised(kl, kl_in)
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=Estimator((*taken, LeaveOneOut())),
        likelihood=Token(ratio="product"),
        loss=Surrogate(clip, clip, anchors=kept, denominator="rows"),
    )


def text_dr_grpo(
    *, length: int = 3000, group: int = 8, clip: float = 0.2, temperature: float = 1.0,
    top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """Dr. GRPO, arXiv:2503.20783: no division by the group's std, sums over tokens divided by the
    constant `length`, no KL. 8 completions a prompt, 3,000 tokens.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=Estimator((Standardize(scale=None),)),
        likelihood=Token(),
        loss=Surrogate(clip, clip, denominator=length),
    )


def text_dapo(
    *, length: int = 20480, group: int = 16, low: float = 0.2, high: float = 0.28,
    temperature: float = 1.0, top_p: float = 1.0, cut: Literal["train", "mask"] = "mask",
) -> Algorithm:  # fmt: skip
    """DAPO, arXiv:2503.14476: the clip range is wider above (0.28), every token of the batch counts
    the same, no KL, completions that were cut off are masked, and groups that all score the same
    are left out. 16 completions a prompt, 20,480 tokens.

    The paper draws further prompts in place of groups left out (dynamic sampling): that is the
    setting `budget.flat: resample`; the recipe alone only drops them. Its soft penalty of long
    completions is the reward `length`.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=Estimator((DropFlat(), Standardize("group", correction=1))),
        likelihood=Token(cut=cut),
        loss=Surrogate(low, high, denominator="tokens"),
    )


def text_gspo(
    *, length: int = 4096, group: int = 16, low: float = 3e-4, high: float = 4e-4,
    temperature: float = 1.0, top_p: float = 1.0,
    ratio: Literal["sequence", "sequence_token"] = "sequence",
) -> Algorithm:  # fmt: skip
    """GSPO, arXiv:2507.18071: one ratio a completion, the geometric mean of its tokens', clipped at
    3e-4 below and 4e-4 above. `ratio: sequence_token` is GSPO-token.

    The paper states neither group nor length: 16 and 4,096 are ours.
    """
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p),
        advantage=Estimator((Standardize("group", correction=1),)),
        likelihood=Token(ratio=ratio),
        loss=Surrogate(low, high, denominator="rows"),
    )


def text_tree(
    *, length: int = 1024, roots: int = 4, branch: int = 2, at: tuple[int, ...] = (256,),
    clip: float = 0.2, credit: Literal["depth", "local"] = "depth", temperature: float = 1.0,
    top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """Completions that branch after `at` tokens, so that a segment has credit of its own: a node is
    worth the mean of its completions.

    credit  depth  nodes of one depth compete, as in BranchGRPO (arXiv:2509.06040)
            local  a node against its draw and against its parent, TreeRL (arXiv:2506.11902)

    Numbers are ours. A token that completions share is in the loss once.
    """
    rule = Standardize("group", correction=1) if credit == "depth" else GlobalLocal()
    return Algorithm(
        steps=length,
        plan=Segments(roots, branch, at, temperature, top_p),
        advantage=Estimator((rule,)),
        likelihood=Token(),
        loss=Surrogate(clip, clip, denominator="tokens"),
    )
