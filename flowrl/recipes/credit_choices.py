"""Credit by name, for recipes whose samples are independent: images, videos and texts."""

from collections.abc import Callable
from functools import partial
from typing import Literal

from flowrl.credit.advantages import Standardize, Sum
from flowrl.credit.augmented import Augmented
from flowrl.credit.success import BestGap
from flowrl.credit.trackers import NoTracker, PromptValues, Tracker
from flowrl.credit.values import Transform
from flowrl.errors import UserError

CreditName = Literal["group", "gdpo", "aapo", "best_gap"]


def credit_chain(name: CreditName, standardize: Standardize) -> tuple[Transform, ...]:
    """Transforms of a credit; `standardize` is the recipe's own. UserError for a blend that the
    credit does not use.

    group     the recipe's own; with blend, groups without spread get the batch's advantage
    gdpo      each reward standardised by itself, then their sum standardised over the batch
              (arXiv:2601.05242)
    aapo      the recipe's own, plus the clipped difference from the prompt's running mean, which
              replaces the paper's reference sample (arXiv:2505.14264)
    best_gap  the margin of a group's best sample over the second best (arXiv:2503.19595)
    """
    if standardize.blend and name in ("gdpo", "best_gap"):
        raise UserError(f"credit: {name} does not use blend: leave it out")
    if not 0 <= standardize.blend <= 1:
        raise UserError(f"blend must be between 0 and 1, not {standardize.blend}")
    whole = Standardize("batch", standardize.correction, standardize.eps, centre="batch")
    chains: dict[CreditName, tuple[Transform, ...]] = {
        "group": (standardize,),
        "gdpo": (
            Standardize("group", standardize.correction, standardize.eps),
            Sum(partial=True),
            whole,
        ),
        "aapo": (Augmented(standardize),),
        "best_gap": (BestGap(),),
    }
    return chains[name]


def credit_tracker(name: str) -> Callable[[], Tracker]:
    """The tracker that a credit needs: the running mean of each prompt, or none."""
    return partial(PromptValues, 0.9) if name == "aapo" else NoTracker
