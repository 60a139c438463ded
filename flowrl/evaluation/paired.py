"""Differences of two models' scores on the same prompts and noise, with intervals over prompts."""

import numpy as np
from jaxtyping import Float, Int

from flowrl.evaluation.agreement import MeanInterval, Resamples

LEVEL = 0.95
_DRAWS, _MOST_COUNTS = 10_000, 20_000_000  # resamples, and their numbers in memory


def paired_gain(
    now: Float[np.ndarray, " n"],
    base: Float[np.ndarray, " n"],
    group: Int[np.ndarray, " n"],
) -> MeanInterval:
    """Mean difference now - base with its 95 % interval; its `n` counts prompts.

    Row i of both has the same prompt and noise. NaN means unscored, and such pairs are left out.
    Differences are averaged within each prompt (`group`), and then over prompts, which are
    resampled (percentile bootstrap, widened for few prompts; see `agreement`). NaN bounds for fewer
    than two prompts.
    """
    means = prompt_means(now - base, group)
    means = means[~np.isnan(means)]
    count = len(means)
    if not count:
        return MeanInterval(float("nan"), float("nan"), float("nan"), 0)
    draws = max(1000, min(_DRAWS, _MOST_COUNTS // count))
    return Resamples.draw(count, draws, LEVEL, 0).estimate(means, np.arange(count))


def prompt_means(
    values: Float[np.ndarray, " n"], group: Int[np.ndarray, " n"]
) -> Float[np.ndarray, " c"]:
    """Mean of each prompt's non-NaN values, in order; NaN if there are none."""
    _, prompt = np.unique(group, return_inverse=True)
    scored, count = ~np.isnan(values), int(prompt.max(initial=-1)) + 1
    sums = np.bincount(prompt[scored], values[scored], minlength=count)
    with np.errstate(invalid="ignore"):
        return sums / np.bincount(prompt[scored], minlength=count)
