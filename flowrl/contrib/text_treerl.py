"""TreeRL: completions forked at their most uncertain tokens."""

from typing import Literal

from flowrl.algorithm import Algorithm
from flowrl.credit.trees import GlobalLocal
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors
from flowrl.recipes.text import sampling_settings, texts
from samplers.completions import Forks
from samplers.forks import Forking


@rests_on("code")
@sampling_settings(temperature=1.2, top_p=0.95)
def text_treerl(
    *, length: int = 4096, roots: int = 6, top: int = 2, rounds: int = 1, branch: int = 2,
    by: Literal["entropy", "surprise"] = "surprise", clip: float = 0.2, kl: float = 0.0,
) -> Algorithm:  # fmt: skip
    """TreeRL, arXiv:2506.11902, with EPTree's (M, N, L, T) = (6, 2, 1, 2): 6 completions, each
    forked in 1 round at its 2 most uncertain tokens, with 2 new completions from each token: 30
    per prompt.

    A node's credit is the sum of two differences, divided by the square root of the number of
    completions below the node: its value minus the prompt's mean, and its value minus its parent's
    (for a first node, the prompt's mean again). Each of these completions trains the node. The
    uncertainty of a token is minus its log-probability, as in the published code; `by: entropy`
    takes the entropy of its distribution. Temperature 1.2 and top-p 0.95 are the published code's.

    Differences: all 30 completions are trained, instead of 16 with a correct one among them; tokens
    after the words "answer" and "conclusion" may fork; the ratio is clipped, instead of one step of
    REINFORCE (equivalent with `train.updates: 1`); there is no KL unless `kl` is set.

    roots   completions per prompt that begin at the prompt (EPTree's M), at least 1
    top     most uncertain tokens at which each tree forks in a round (N), at least 1
    rounds  rounds of forks (L), at least 1; later ones may fork what earlier ones made
    branch  completions that continue from each of these tokens (T), at least 1
    by      uncertainty of a token: its `surprise`, minus its log-probability, or the `entropy` of
            its distribution
    """
    plan = Forks(roots, Forking(top, branch, rounds, by))
    loss = Surrogate(clip, clip, anchors=anchors(kl))
    return texts(length, plan, (GlobalLocal(first=True),), loss)
