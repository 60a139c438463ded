"""Statistics of preferences, each against an independent computation or a law."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flowrl.evaluation.agreement import (
    Resamples,
    agreement,
    calibration,
    credits,
    fitted_scale,
    position,
    preferred,
    rank_correlations,
    tie_threshold,
)
from flowrl.evaluation.perturb import EDITS, ScoredPairs, change, robustness, spread

SMALL = st.integers(-3, 3).map(float)
LABELS = st.sampled_from([0.0, 0.5, 1.0])
PAIRED = st.lists(st.tuples(SMALL, LABELS), min_size=1, max_size=12).map(
    lambda rows: tuple(np.array(column) for column in zip(*rows, strict=True))
)


def test_credits_are_the_papers_tables():
    margin = np.array([2.0, -2.0, 0.0, 2.0, 0.0, -2.0, np.nan])
    label = np.array([1.0, 1.0, 1.0, 0.5, 0.5, 0.0, 1.0])
    nan = np.nan
    expected = {
        "half": [1, 0, 0.5, 0.5, 1, 1, nan],  # PickScore's calc_score
        "excluded": [1, 0, 0, nan, nan, 1, nan],  # ImageReward's acc
        "calibrated": [1, 0, 0, 0, 1, 1, nan],  # (C + Thm) / all
    }
    for ties, values in expected.items():
        np.testing.assert_array_equal(credits(margin, label, ties), values)
    np.testing.assert_array_equal(credits(margin, label, "calibrated", 2.0)[:6], [0, 0, 0, 1, 1, 0])
    assert preferred(np.array([0.75, 0.5, 0.25])).tolist() == [1, 0, -1]


@given(PAIRED)
def test_exchanging_a_and_b_changes_nothing(pairs):
    margin, label = pairs
    for ties in ("half", "excluded", "calibrated"):
        there, back = credits(margin, label, ties), credits(-margin, 1 - label, ties)
        np.testing.assert_array_equal(there, back)


@given(PAIRED)
def test_the_tie_threshold_is_the_best_of_all(pairs):
    margin, label = pairs

    def right(threshold: float) -> int:
        verdict = [0 if abs(m) <= threshold else np.sign(m) for m in margin]
        return sum(v == np.sign(want - 0.5) for v, want in zip(verdict, label, strict=True))

    found = tie_threshold(margin, label)
    best = max(right(t) for t in [0.0, *np.abs(margin)])
    assert right(found) == best
    assert all(right(t) < best for t in {0.0, *np.abs(margin)} if t < found)
    assert credits(margin, label, "calibrated", found).sum() == best


def test_intervals_hold_their_level():
    """Of 400 data sets with 60 prompts of 1 to 4 pairs, an interval of 90 % holds the truth in
    about 360: within four standard deviations of a fair count (24), which both too wide and too
    narrow ones leave. Pairs of a prompt agree, so that intervals over pairs would be too narrow."""
    rng = np.random.default_rng(0)
    held = 0
    resamples = Resamples.draw(60, 400, 0.9, 1)
    cluster = np.repeat(np.arange(60), rng.integers(1, 5, 60))
    for _ in range(400):
        value = (rng.random(60) < 0.7)[cluster].astype(float)
        e = resamples.share(value, cluster)
        held += e.low <= 0.7 <= e.high
    assert 336 <= held <= 384


def test_the_bootstrap_is_the_textbooks():
    rng = np.random.default_rng(3)
    cluster = rng.integers(0, 30, 200)
    values = rng.normal(size=200)
    values[::7] = np.nan
    resamples = Resamples.draw(30, 50, 0.95, 4)
    assert (resamples.weights.sum(1) == 30).all()
    for weights, mean in zip(resamples.weights, resamples.means(values, cluster), strict=True):
        drawn = [values[cluster == c] for c, w in enumerate(weights) for _ in range(int(w))]
        assert mean == pytest.approx(np.nanmean(np.concatenate(drawn)), rel=1e-5)
    many = Resamples.draw(30, 4000, 0.95, 4)
    found = many.means(values, cluster)
    low, high = many.interval(found)
    wide = stats.t.ppf(0.975, 29) * (30 / 29) ** 0.5  # Hesterberg's wider quantiles
    assert (low, high) == pytest.approx(
        np.quantile(found, [stats.norm.cdf(-wide), stats.norm.cdf(wide)])
    )
    again = Resamples.draw(30, 50, 0.95, 4)
    assert np.array_equal(again.weights, resamples.weights)
    assert not np.array_equal(Resamples.draw(30, 50, 0.95, 5).weights, resamples.weights)


def test_without_a_wrong_verdict_the_interval_is_the_exact_bound():
    resamples = Resamples.draw(10, 100, 0.9, 0)
    e = resamples.share(np.ones(30), np.arange(30) % 10)
    assert (e.value, e.high) == (1.0, 1.0) and e.low == pytest.approx(0.05**0.1)
    assert stats.binom.cdf(9, 10, e.low) == pytest.approx(0.95)  # ten of ten has P 0.05 there
    worst = resamples.share(np.zeros(30), np.arange(30) % 10)
    assert worst.high == pytest.approx(1 - e.low) and worst.low == 0
    nothing = resamples.share(np.full(3, np.nan), np.arange(3))
    assert nothing.n == 0 and np.isnan(nothing.value)


@pytest.mark.parametrize(("least", "most", "value"), [(-1, 1, 0.5), (-1, 1, 0.0), (0, 1, 0.5)])
def test_equal_values_are_no_certainty(least, most, value):
    """The bootstrap of equal values has no spread. At its ends the interval's mean is that of
    prompts that have the value with the probability with which ten of ten do in one case of 20."""
    resamples = Resamples.draw(10, 100, 0.9, 0)
    e = resamples.within(np.full(30, value), np.arange(30) % 10, least, most)
    assert e.value == value
    for end, other in ((e.low, least), (e.high, most)):
        share = (end - other) / (value - other)
        assert share**10 == pytest.approx(0.05)
    spread = np.arange(30) % 10 / 10
    one, two = (f(spread, np.arange(30) % 10) for f in (resamples.estimate, resamples.share))
    assert one == two, "values that differ have the bootstrap's interval"


def test_rank_correlations_by_counting_pairs():
    rng = np.random.default_rng(1)
    score, rank = rng.integers(0, 4, 40).astype(float), rng.integers(1, 5, 40).astype(float)
    groups = [np.arange(i, i + 5) for i in range(0, 40, 5)]
    tau, rho = rank_correlations(score, rank, groups)
    for rows, t, r in zip(groups, tau, rho, strict=True):
        s = k = ts = tr = 0
        for i, j in itertools.combinations(rows, 2):
            a, b = np.sign(score[i] - score[j]), np.sign(rank[j] - rank[i])
            s, k, ts, tr = s + a * b, k + 1, ts + (a == 0), tr + (b == 0)
        assert t == pytest.approx(s / ((k - ts) * (k - tr)) ** 0.5)
        places = [stats.rankdata(score[rows]), stats.rankdata(-rank[rows])]
        assert r == pytest.approx(np.corrcoef(places)[0, 1])
    # a constant score orders nothing; a constant order by people, or one sample, says nothing
    odd = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5])]
    score, rank = np.array([1.0, 1, 1, 2, 1, np.nan]), np.array([1.0, 2, 1, 1, 1, 2])
    np.testing.assert_array_equal(rank_correlations(score, rank, odd)[0], [0, np.nan, np.nan])


def test_calibration_of_a_judge_that_is_right_and_of_one_that_is_too_sure():
    rng = np.random.default_rng(0)
    p = rng.random(40_000)
    label = (rng.random(40_000) < p).astype(float)
    fair = calibration(p, label)
    assert fair.ece < 0.01 and fair.brier == pytest.approx(1 / 6, abs=0.005)  # E p (1 - p)
    sure = calibration((p > 0.5).astype(float), label)
    assert sure.said == (0, 1) and sure.seen == pytest.approx((0.25, 0.75), abs=0.01)
    assert sure.ece == pytest.approx(0.25, abs=0.01) and sure.n == (40_000, 40_000)
    assert calibration(np.full(3, np.nan), np.ones(3)).n == ()
    by_hand = calibration(np.array([0.9, 0.8]), np.array([1.0, 0.0]))
    assert by_hand.brier == pytest.approx((0.01 + 0.64) / 2)
    assert by_hand.ece == pytest.approx((0.1 + 0.8) / 2)


@given(PAIRED)
def test_calibration_does_not_see_the_order(pairs):
    margin, label = pairs
    p = 1 / (1 + np.exp(-margin))
    there, back = calibration(p, label), calibration(1 - p, 1 - label)
    assert there.brier == pytest.approx(back.brier) and there.ece == pytest.approx(back.ece)


def test_the_fitted_scale_is_found_again():
    rng = np.random.default_rng(0)
    margin = rng.normal(0, 3, 20_000)
    label = (rng.random(20_000) < 1 / (1 + np.exp(-margin / 1.7))).astype(float)
    assert fitted_scale(margin, label) == pytest.approx(1.7, rel=0.05)
    assert fitted_scale(1000 * margin, label) == pytest.approx(1700, rel=0.05)
    assert fitted_scale(-margin, label) == np.inf
    assert fitted_scale(np.zeros(4), np.ones(4)) == np.inf


def test_position_bias():
    ab, ba = np.array([0.9, 0.9, 0.2, 0.5, 0.8]), np.array([0.1, 0.8, 0.1, 0.5, np.nan])
    found = position(ab, ba)
    assert found.n == 4 and found.to_first == 0.25 and found.to_second == 0.25
    assert found.consistent == 0.5
    assert found.toward_first == pytest.approx((2.5 + 1.5) / 8 - 0.5)
    fair = position(np.array([0.7, 0.2]), np.array([0.3, 0.8]))
    assert fair.toward_first == pytest.approx(0) and fair.consistent == 1


def test_agreement_counts_pairs_that_both_decide():
    first = np.array([1.0, -1, 0, 2, np.nan])
    second = np.array([3.0, 1, 1, 0, 1])
    found = agreement([first, second, np.zeros(5)])
    np.testing.assert_array_equal(found, [[1, 0.5, np.nan], [0.5, 1, np.nan], [np.nan] * 3])


def test_the_spread_is_pooled_within_groups():
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(500), 4)
    score = rng.normal(0, 2, 2000) + 100 * group
    assert spread(score, group) == pytest.approx(2, rel=0.05)
    score[::4] = np.nan
    assert spread(score, group) == pytest.approx(2, rel=0.07)
    assert spread(np.array([1.0, 3.0]), np.array([0, 1])) == pytest.approx(2**0.5)


def test_robustness_in_units_of_the_spread():
    """Three pairs (winner, loser); the edit adds 2 to the first two losers and 8 to a winner, which
    must not help it: only the loser of a pair is changed when they meet."""
    a, b = np.array([0, 3, 4, 6]), np.array([1, 2, 5, 7])
    pairs = ScoredPairs.of(a, b, np.array([1.0, 0.0, 1.0, 0.5]), np.array([0, 1, 2, 3]))
    assert pairs.winner.tolist() == [0, 2, 4] and pairs.loser.tolist() == [1, 3, 5]
    clean = np.array([2.0, 1, 5, 1, 0, 1, 0, 0])
    changed = clean + np.array([8, 2, 0, 2, 0, 0, np.nan, np.nan])
    found = robustness(clean, {"e": changed}, pairs, 0.5, Resamples.draw(4, 50, 0.9, 0))["e"]
    assert found.n == 6 and found.raised == pytest.approx(3 / 6)
    assert found.shift.value == pytest.approx(12 / 6 / 0.5)
    # of the two pairs that were right the first loser (3 against 2) wins, the second (3 against 5)
    # does not; the third pair was wrong already
    assert found.overtakes.value == 0.5 and found.overtakes.n == 2


def test_edits_keep_the_size_differ_and_are_the_same_again():
    import torch

    image = torch.rand(3, 40, 24, generator=torch.Generator().manual_seed(0))
    film = torch.stack([image, 1 - image])
    for name, edit in EDITS.items():
        once, again = change(edit, 3)(image, 5), change(edit, 3)(image, 5)
        assert once.shape == image.shape and once.min() >= 0 and once.max() <= 1, name
        assert torch.equal(once, again) and (once - image).abs().max() > 0.02, name
        assert change(edit, 3)(film, 5).shape == film.shape
    noisy = [change(EDITS["noise"], 3)(image, row) for row in (1, 2)]
    assert not torch.equal(*noisy)


def test_what_the_edits_do():
    import torch

    ramp = torch.linspace(0.2, 0.8, 64).expand(3, 64, 64).clone()
    ramp[0] += 0.1
    done = {name: change(edit, 0)(ramp, 0) for name, edit in EDITS.items()}
    slope = {name: float((x[1, 20, 40] - x[1, 20, 24]) / 16) for name, x in done.items()}
    plain = 0.6 / 63
    assert slope["crop"] == pytest.approx(0.8 * plain, rel=0.05)
    assert slope["blur"] == pytest.approx(plain, rel=0.05)
    assert float((done["noise"] - ramp).std()) == pytest.approx(0.04, rel=0.05)
    assert torch.allclose(done["brighten"], (1.15 * ramp).clamp(0, 1), atol=0.01)
    apart = (done["saturate"][0] - done["saturate"][1]).mean()
    assert float(apart) == pytest.approx(1.6 * 0.1, rel=0.05)
    band = done["text"][:, -8:] - ramp[:, -8:]
    assert float(band.abs().mean()) > 0.2 and torch.equal(
        done["text"][:, :55], change(lambda i, r: i, 0)(ramp, 0)[:, :55]
    )
    edge = torch.zeros(3, 32, 32)
    edge[:, :, 16:] = 0.5
    sharp = change(EDITS["sharpen"], 0)(edge, 0)
    assert float(sharp.max()) > 0.55


@pytest.mark.parametrize("prompts", [2, 3, 4, 5])
@pytest.mark.parametrize("spread", [2.0, 10.0])
def test_an_interval_over_few_prompts_holds_what_it_says(prompts, spread):
    """The range of the means of two, three and four prompts holds the share in 53 to 87 of 100
    tables; the interval says 95."""
    rng = np.random.default_rng(0)
    resamples = Resamples.draw(prompts, 500, 0.95, 0)
    cluster, share, held = np.repeat(np.arange(prompts), 6), 0.7, 0
    for _ in range(300):
        of_prompt = rng.beta(share * spread, (1 - share) * spread, prompts)
        right = (rng.random((prompts, 6)) < of_prompt[:, None]).astype(float)
        interval = resamples.share(right.ravel(), cluster)
        assert 0 <= interval.low <= interval.value <= interval.high <= 1
        held += interval.low <= share <= interval.high
    assert held / 300 > (0.78 if prompts == 2 else 0.87)
