"""SPO-tree: the value of a segment minus its parent's."""

from flowrl.algorithm import Algorithm
from flowrl.credit.comparisons import ParentDifference
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.text import sampling_settings, texts
from samplers.completions import Segments


@rests_on("paper")
@sampling_settings()
def text_spo_tree(
    *, length: int = 1024, roots: int = 6, branch: int = 6, at: tuple[int, ...] = (256, 512),
    clip: float = 0.2,
) -> Algorithm:  # fmt: skip
    """SPO-tree, arXiv:2505.23564: a segment's advantage is its node's value minus the parent's, in
    trees that branch 6 times at each level.

    The paper trains only tokens of probability below 0.9 in a segment; here all tokens are
    trained.

    roots   completions per prompt that begin at the prompt, at least 1
    branch  completions that continue from each cut, at least 2
    at      numbers of tokens after which completions branch, increasing and below `length`
    """
    plan = Segments(roots, branch, at)
    return texts(length, plan, (ParentDifference(),), Surrogate(clip, clip))
