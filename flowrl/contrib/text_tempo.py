"""TEMPO: the group's advantage, plus a branch's gain over its parent."""

from flowrl.algorithm import Algorithm
from flowrl.credit.trees import GlobalLocal
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.text import sampling_settings, texts
from samplers.completions import Segments


@rests_on("paper")
@sampling_settings()
def text_tempo(
    *, length: int = 1024, roots: int = 4, branch: int = 2, at: tuple[int, ...] = (256,),
    clip: float = 0.2,
) -> Algorithm:  # fmt: skip
    """TEMPO, arXiv:2509.18314: the group's advantage, plus a branch's gain over its parent.

    The paper searches for prefixes that completions share by chance; here the plan creates shared
    prefixes. The paper sums a token's terms over all completions that contain it; here a shared
    token is trained once, with that sum.

    roots   completions per prompt that begin at the prompt, at least 1
    branch  completions that continue from each cut, at least 2
    at      numbers of tokens after which completions branch, increasing and below `length`
    """
    credit = (GlobalLocal(power=1.0, scaled=True),)
    return texts(length, Segments(roots, branch, at), credit, Surrogate(clip, clip))
