"""Recipes of language models whose baseline is a sample that is not trained on."""

from flowrl.algorithm import Algorithm
from flowrl.credit.advantages import Estimator
from flowrl.credit.turns import GreedyBaseline
from flowrl.likelihoods.token import Token
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.text import KLPlacement, penalised
from samplers.completions import Completions


def text_remax(
    *, length: int = 512, group: int = 1, clip: float = 0.2, kl: float = 0.0,
    kl_in: KLPlacement = "loss", temperature: float = 1.0, top_p: float = 1.0,
) -> Algorithm:  # fmt: skip
    """ReMax, arXiv:2310.10505: one completion a prompt, each one action, less the reward of the
    greedy completion of the same prompt, which is drawn and scored but not trained on.

    With one update an iteration the clip never acts, and this is the paper's estimator. `group`
    counts the sampled completions; `reward` of the log is over the greedy ones too. The length is
    ours.

    kl_in  reward  as in the paper: `kl` times log(policy / start) of the whole completion is taken
                   off its reward, not off the baseline's
           loss    `kl` is a term of the loss
    """
    taken, kept = penalised(kl, kl_in)
    return Algorithm(
        steps=length,
        plan=Completions(group, temperature, top_p, greedy=True),
        advantage=Estimator((GreedyBaseline(group + 1), *taken)),
        likelihood=Token(ratio="product"),
        loss=Surrogate(clip, clip, anchors=kept, denominator="rows"),
    )
