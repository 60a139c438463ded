"""Intervals of paired differences beside Student's, and pairs that lack a score."""

import numpy as np
import pytest
from scipy import stats

from flowrl.evaluation.paired import paired_gain


@pytest.mark.parametrize("prompts", [12, 60])
def test_the_interval_is_close_to_students(prompts: int) -> None:
    draws = np.random.default_rng(0)
    group = np.repeat(np.arange(prompts), 4)
    level = np.repeat(draws.normal(size=prompts), 4)  # shared by both: pairing removes it
    effect = np.repeat(draws.normal(0.3, 0.5, size=prompts), 4)
    base = level + draws.normal(0, 0.2, size=4 * prompts)
    now = base + effect
    gain = paired_gain(now, base, group)
    means = effect[::4]
    half = stats.t.ppf(0.975, prompts - 1) * means.std(ddof=1) / prompts**0.5
    assert gain.value == pytest.approx(means.mean()) and gain.n == prompts
    assert (gain.high - gain.low) / 2 == pytest.approx(half, rel=0.07)
    assert gain.low < means.mean() < gain.high


def test_a_pair_without_a_score_is_left_out() -> None:
    group = np.array([5, 5, 9, 9])
    now, base = np.array([1.0, 2.0, 3.0, np.nan]), np.array([0.0, np.nan, 1.0, 1.0])
    gain = paired_gain(now, base, group)
    assert gain.value == pytest.approx((1 + 2) / 2) and gain.n == 2
    one = paired_gain(now[:2], base[:2], group[:2])
    assert one.value == 1 and np.isnan(one.low)
    assert paired_gain(now[:1], base[1:2], group[:1]).n == 0
