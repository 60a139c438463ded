"""Recipes whose completions fork where the model is unsure. `flowrl/recipes/text.py` says what all
recipes of language models share."""

from typing import Literal

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Estimator
from flowrl.credit.trees import GlobalLocal
from flowrl.likelihoods.token import Token
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.text import anchors
from samplers.completions import Forks
from samplers.forks import Forking


def text_treerl(
    *, length: int = 4096, roots: int = 6, top: int = 2, rounds: int = 1, branch: int = 2,
    by: Literal["entropy", "surprise"] = "surprise", clip: float = 0.2, kl: float = 0.0,
    temperature: float = 1.2, top_p: float = 0.95,
) -> Algorithm:  # fmt: skip
    """TreeRL, arXiv:2506.11902: EPTree's (M, N, L, T) = (6, 2, 1, 2), so 6 completions, each forked
    at its 2 most uncertain tokens in 1 round with 2 new completions from each: 30 a prompt.

    A node's credit is what it is above the prompt's mean and above its parent, over the square root
    of its completions, and each of them trains it; a first node's parent is the prompt. Uncertainty
    is minus the log-probability of the token drawn, as in the published code, or `by: entropy` that
    of the distribution it was drawn from; temperature 1.2 and top-p 0.95 are that code's too.

    Differences: all 30 are trained, not 16 of them with a correct one among them; tokens behind
    the words "answer" and "conclusion" may fork; a clipped ratio, in place of one step of
    REINFORCE (with `train.updates: 1` they are the same); no KL unless it is asked for.
    """
    return Algorithm(
        steps=length,
        plan=Forks(roots, Forking(top, branch, rounds, by), temperature, top_p),
        advantage=Estimator((GlobalLocal(first=True),)),
        likelihood=Token(),
        loss=Surrogate(clip, clip, anchors=anchors(kl), denominator="tokens"),
    )
