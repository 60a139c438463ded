"""IGPO: a turn is rewarded by what it adds to the probability of the right answer."""

from flowrl.algorithm import Algorithm
from flowrl.credit.process import GroupReturns, Information
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.grpo import anchors
from flowrl.recipes.text import sampling_settings, texts


@rests_on("paper")
@sampling_settings()
def text_igpo(
    *, length: int = 4096, group: int = 8, answer: str = "answer", before: str = "",
    gamma: float = 1.0, clip: float = 0.2, kl: float = 0.0,
) -> Algorithm:  # fmt: skip
    """IGPO, arXiv:2510.14967: a turn is rewarded by what it adds to the policy's own probability
    of the right answer, the last one by the outcome. All these rewards of a group are standardised
    together, and a turn's advantage is their discounted sum from it on. Needs `model.environment`,
    or `model.steps`.

    A probability is the geometric mean over the answer's tokens, at temperature 1. The numbers are
    ours.

    answer  column of the prompt file with the right answer
    before  text between the transcript and that answer, for the probability
    gamma   discount of later turns' rewards per turn, in [0, 1]; smaller credits a turn more for
            its own gain
    """
    loss = Surrogate(clip, clip, anchors=anchors(kl))
    credit = GroupReturns(gamma, True, Information(answer, before))
    return texts(length, group, (credit,), loss)
