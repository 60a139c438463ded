"""The healthy ranges of metrics, which docs/metrics.md prints and alarms watch.

A metric that is outside of its range for some iterations in a row raises an alarm once. Ranges are
wide: a run inside of them may still be bad, and one outside of them has a reason worth a look.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple


class Range(NamedTuple):
    """A healthy range, both ends included.

    words     as docs/metrics.md has them
    remedy    the first thing to look at outside of it
    patience  iterations in a row outside of it that raise an alarm
    """

    low: float
    high: float
    words: str
    remedy: str
    patience: int = 5


def below(high: float, remedy: str) -> Range:
    return Range(-math.inf, high, f"below {high:g}", remedy)


def above(low: float, remedy: str) -> Range:
    return Range(low, math.inf, f"above {low:g}", remedy)


def within_both(low: float, high: float, remedy: str) -> Range:
    return Range(low, high, f"{low:g} to {high:g}", remedy)


SERVER = (
    "the server does not generate with the weights that are trained, or in another precision: "
    "restart it with the model's own weights, and see docs/text_server.md"
)
ENGINE_REMEDY = (
    "the engine does not sample with the weights that are trained: restart it with the model's own "
    "weights, and see docs/engines.md"
)
TOO_OLD = "samples are too old for the weights: lower workers.lag, train.lr or train.updates"
CLIP = "lower train.lr or train.updates, or widen recipe.clip"
MISMATCH_EXACT, MISMATCH_COARSE = 1e-2, 0.1  # nats, of float32 and of half precision or a server

RANGES: Mapping[str, Range] = {
    "flat_groups": below(
        0.7,
        "most groups teach nothing: choose prompts of a middling difficulty, a larger group, or "
        "budget.flat: resample",
    )._replace(patience=10),  # rare successes may come late
    "text/empty": below(0.05, "texts end before they begin: look at the prompts and the template"),
    "ratio": within_both(0.9, 1.1, CLIP),
    "clipped_low": below(0.5, CLIP),
    "clipped_high": below(0.5, CLIP),
    "clipped_dual": below(0.1, CLIP),
    "gate": within_both(0.5, 1.5, "lower train.lr or train.updates"),
    "phi": within_both(0.5, 2.0, "lower train.lr or train.updates"),
    "gated": below(0.5, "the rewards disagree on most samples: look at them"),
    "outside": below(0.9, "raise recipe.most, or lower train.lr"),
    "weight": within_both(0.01, 0.99, "lower recipe.beta or train.lr"),
    "won": above(0.4, "lower train.lr: the policy turns away from the better samples"),
    "unscored_way": below(0.9, "intermediate rewards score almost no state: see their report"),
    "guide/moved": below(1.0, "lower recipe.scale"),
    "through/satisfied": below(
        0.99, "the samples score above the bound, so nothing is learned: raise recipe.bound"
    ),
    "skipped": below(0.9, "gradients are not finite: lower train.lr, or use model.dtype: bfloat16"),
    "mismatch_weight": within_both(0.8, 1.25, SERVER),
    "mismatch_truncated": below(0.1, SERVER),
    "mismatch_masked": below(0.1, SERVER),
    "mismatch_effective": above(0.9, SERVER),
    "behind_weight": within_both(0.8, 1.25, TOO_OLD),
    "behind_outside": below(0.1, TOO_OLD),
    "behind_clipped": below(0.3, TOO_OLD),
    "off_policy": below(0.3, TOO_OLD),
    "budget/rounds": below(3.0, "most prompts are too easy or too hard: see budget.rates"),
}
"""By metric. `mismatch` has a bound of its own: see `mismatch_range`."""


def mismatch_range(exact: bool) -> Range:
    """The range of `mismatch`. `exact`: the model itself samples, in float32 or better."""
    return below(MISMATCH_EXACT if exact else MISMATCH_COARSE, SERVER)


def ranges_of(exact: bool, compares: bool) -> dict[str, Range]:
    """The ranges of a run. `compares`: its loss compares the samples of a group."""
    ranges = {**RANGES, "mismatch": mismatch_range(exact)}
    return ranges if compares else {k: v for k, v in ranges.items() if k != "flat_groups"}
