"""Single-stream policy optimisation: one completion per prompt."""

from functools import partial

from flowrl.algorithm import Algorithm
from flowrl.credit.trackers import PromptValues
from flowrl.credit.turns import Baseline
from flowrl.losses.ratio import Surrogate
from flowrl.recipes.evidence import rests_on
from flowrl.recipes.text import OVER_BATCH, sampling_settings, texts


@rests_on("paper")
@sampling_settings()
def text_stream(
    *, length: int = 1024, group: int = 1, keep: float = 0.9, uncertain: bool = True,
    clip: float = 0.2,
) -> Algorithm:  # fmt: skip
    """Single-stream policy optimisation, arXiv:2509.13232: one completion per prompt, compared with
    the prompt's expected score, then whitened over the batch. Prompts with an uncertain outcome are
    drawn more often (`uncertain`). Scores are in 0..1.

    The decay of a prompt's past scores is constant here: see `flowrl.credit.trackers.PromptValues`.

    group      completions per prompt, at least 1; they are compared with the prompt's expected
               score
    keep       share of a prompt's earlier evidence that each use leaves, in [0, 1); larger makes
               its expected score steadier and slower
    uncertain  whether prompts with an uncertain outcome are drawn more often, in place of all in
               turn
    """
    tracker = partial(PromptValues, keep, uncertain=uncertain)
    credit = (Baseline(), OVER_BATCH)
    return texts(length, group, credit, Surrogate(clip, clip), tracker=tracker)
