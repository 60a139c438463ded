"""Budgets by exhaustive search, trackers by their laws, and both inside a run that is resumed."""

from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.budget.knapsack import gain, knapsack
from flowrl.contrib.text_riskpo import QUANTILES, ScoreQuantiles
from flowrl.credit.advantages import Context, Credit, Estimator, LeaveOneOut, Standardize, Sum
from flowrl.credit.selection import DropFlat, MaxVariance
from flowrl.credit.trackers import NoTracker, PromptValues, Tracker
from flowrl.credit.values import tracked
from flowrl.errors import UserError
from flowrl.prompts import PromptSet, uncertainty, weighted_draw
from rewards import Scores
from tests.support.golden_tools import close, columns


def kept(transforms, values: Tensor, group: int, scored: Tensor | None = None) -> Tensor:
    known = torch.ones(len(values), 1, dtype=torch.bool) if scored is None else scored[:, None]
    scores = Scores(values[:, None].double() * known, known, ("r",))
    return Estimator(transforms)(scores, Context(columns((group,)), torch.ones(1)))[1][:, 0]


def test_flat_groups_are_masked():
    r = torch.tensor([0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1.0])
    assert kept((DropFlat(), Standardize()), r, 4).view(4, 4).all(1).tolist() == [0, 1, 0, 1]
    noisy = r + 0.01 * torch.arange(16).remainder(2)
    assert kept((DropFlat(0.1),), noisy, 4).view(4, 4).all(1).tolist() == [0, 1, 0, 1]
    everyone = Estimator((DropFlat(), Standardize()))
    scores = Scores(r[:, None], torch.ones(16, 1, dtype=torch.bool), ("r",))
    context = Context(columns((4,)), torch.ones(1))
    assert everyone.summed(scores, context).mask[..., 0].any(1).all(), (
        "dropped for its budget, not for a failure"
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6), st.booleans())
def test_the_subset_of_most_variance_is_the_best_of_all(seed, keep, gaps):
    rng = torch.Generator().manual_seed(seed)
    r = torch.rand(12, generator=rng, dtype=torch.float64)
    scored = torch.rand(12, generator=rng) > (0.2 if gaps else -1)
    got = kept((MaxVariance(keep),), r, 6, scored).view(2, 6)
    for g in range(2):
        mine = [i for i in range(6) if scored[6 * g + i]]
        chosen = [i for i in range(6) if got[g, i]]
        assert set(chosen) <= set(mine)
        if len(mine) <= keep:
            assert chosen == mine
            continue
        assert len(chosen) == keep
        spread = {s: float(r[[6 * g + i for i in s]].var(correction=0)) for s in
                  combinations(mine, keep)}  # fmt: skip
        assert spread[tuple(chosen)] == pytest.approx(max(spread.values()))


def test_statistics_before_a_subset_are_of_all():
    r = torch.rand(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = Scores(r[:, None], torch.ones(8, 1, dtype=torch.bool), ("r",))
    context = Context(columns((8,)), torch.ones(1))
    whole, _ = Estimator((Standardize(),))(scores, context)
    some, mask = Estimator((Standardize(), MaxVariance(4)))(scores, context)
    assert torch.equal(some[mask], whole[mask]) and int(mask.sum()) == 4


def test_a_sample_s_own_value_is_that_of_the_last_decision_point_that_it_has():
    """Credit a token: two columns are padding for some, and what stands there says nothing."""
    value = torch.tensor([[9.0, 0.0, 0.0], [9.0, 1.0, 0.0], [9.0, 9.0, 5.0], [9.0, 4.0, 0.0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    credit = Credit(value.double()[..., None], mask[..., None])
    context = Context(columns((4,)), torch.ones(1))
    left = MaxVariance(2)(credit, context).mask[..., 0]  # own values 9, 1, 5 and 4
    assert torch.equal(left, mask & torch.tensor([[True], [True], [False], [False]]))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.integers(6, 14))
def test_knapsack_by_exhaustion(rates, total):
    rates = torch.tensor(rates, dtype=torch.float64)
    counts = knapsack(rates, total, least=2, most=6)
    assert sum(counts) == total and all(2 <= n <= 6 for n in counts)

    def worth(some) -> float:
        return sum(float(gain(rates[i : i + 1], n)) for i, n in enumerate(some))

    best = max(worth(some) for some in product(range(2, 7), repeat=3) if sum(some) == total)
    assert worth(counts) == pytest.approx(best, abs=1e-12)


def test_what_samples_are_worth():
    """A rare success gains from many samples, an even chance from few."""
    rates = torch.tensor([0.05, 0.5, 0.0, 1.0], dtype=torch.float64)
    close(gain(rates, 16)[:1], torch.tensor([0.025]), 5e-4)
    close(gain(rates, 64)[:1], torch.tensor([0.0434]), 5e-4)
    assert gain(rates, 8)[1] > 0.99 * 0.125 and gain(rates, 99)[2:].eq(0).all()
    assert gain(rates, 0).eq(0).all() and gain(rates, 1).abs().max() < 1e-15
    assert knapsack(rates, 40)[0] > knapsack(rates, 40)[1] > 2
    with pytest.raises(UserError, match="cannot add up"):
        knapsack(rates, 7)


def test_draws_in_proportion_to_weights():
    weights = torch.tensor([0.0, 1.0, 2.0, 5.0])
    first = [weighted_draw(weights, 1, (0, "prompts", i))[0] for i in range(3000)]
    share = torch.tensor(first).bincount(minlength=4) / 3000
    close(share, weights / weights.sum(), 0.03)
    assert sorted(weighted_draw(weights, 3, (1,))) == [1, 2, 3], "no prompt twice, none of weight 0"
    assert weighted_draw(weights, 2, (1,)) == weighted_draw(weights, 2, (1,))
    with pytest.raises(UserError, match="3 have a positive weight"):
        weighted_draw(weights, 4, (1,))
    got = uncertainty(torch.tensor([0.0, 0.5, 0.9]), torch.tensor([1.0, 4.0, 1.0]), fade=0.5)
    assert got.tolist() == pytest.approx([0.05, 0.3, 0.35])
    prompts = PromptSet(("a", "b", "c", "d"), ({}, {}, {}, {}))
    drawn = prompts.draw(2, 3, 0, weights)
    assert drawn.ids == (6, 7, 8) and sorted(drawn.rows) == [1, 2, 3]


def context_of(prompts: list[int], group: int = 1) -> Context:
    return Context(columns((group,)), torch.ones(1), prompts=torch.tensor(prompts))


def scores_of(values: list[float]) -> Scores:
    value = torch.tensor(values, dtype=torch.float64)[:, None]
    return Scores(value.nan_to_num(0.0), ~value.isnan(), ("r",))


def test_a_prompts_value_is_a_fading_beta_mean():
    """alpha <- keep alpha + r, beta <- keep beta + 1 - r, and their mean, as the paper has it."""
    tracker = PromptValues(keep=0.9, prior=0.3)
    alpha, beta = 0.3 * 10, 0.7 * 10
    for r in (1.0, 0.0, 1.0, 1.0):
        before = tracker.before(context_of([4]))
        assert tracked(before).baseline.tolist() == pytest.approx([alpha / (alpha + beta)])
        tracker.after(scores_of([r]), before)
        alpha, beta = 0.9 * alpha + r, 0.9 * beta + 1 - r
    value, evidence = tracker.known[4]
    assert (value, evidence) == pytest.approx((alpha / (alpha + beta), alpha + beta))
    assert evidence == pytest.approx(10.0), "a constant stream's evidence is 1 / (1 - keep)"
    assert tracker.value(9) == pytest.approx(value), "new prompts are worth the mean of the known"


def test_groups_and_gaps_in_a_prompts_value():
    tracker = PromptValues(keep=0.5, prior=0.0)
    tracker.after(scores_of([1, 0, float("nan"), float("nan")]), context_of([0, 1], group=2))
    assert tracker.known == {0: (pytest.approx(1 / 3), pytest.approx(3.0))}, "1 was not scored"
    assert tracker.weights(3) is None
    drawn = PromptValues(uncertain=True, known={0: (1.0, 10.0), 1: (0.5, 10.0)}).weights(2)
    assert drawn.tolist() == pytest.approx([0.05, 0.55])


def test_tracked_quantiles_find_a_distributions_quantiles():
    tracker = ScoreQuantiles(bundle=2, low=0.2, high=0.8, rate=0.05)
    rng = torch.Generator().manual_seed(0)
    context = context_of([0, 1], group=10)
    assert tracker.before(context).table[QUANTILES] is None
    for _ in range(800):
        tracker.after(scores_of(torch.rand(20, generator=rng).tolist()), context)
    low, high = tracker.before(context).table[QUANTILES]
    # the sum of two uniform numbers is below x with chance x^2 / 2 for x < 1
    assert low == pytest.approx(0.4**0.5, abs=0.08)
    assert high == pytest.approx(2 - 0.4**0.5, abs=0.08)


@pytest.mark.parametrize(
    "tracker",
    [NoTracker(), PromptValues(known={3: (0.25, 4.0)}), ScoreQuantiles(quantiles=(1.0, 2.0))],
)
def test_a_tracker_goes_through_json(tracker):
    import json

    assert isinstance(tracker, Tracker)
    fresh = type(tracker)()
    fresh.restore(json.loads(json.dumps(tracker.state())))
    assert fresh.state() == tracker.state() and type(fresh) is type(tracker)
    if not isinstance(tracker, NoTracker):
        assert fresh == tracker
    fresh.restore(json.loads(json.dumps(type(tracker)().state())))
    assert fresh.state() == {}


def test_gdpo_counts_failures_after_its_sum():
    values = torch.rand(8, 2, generator=torch.Generator().manual_seed(0))
    scored = torch.ones(8, 2, dtype=torch.bool)
    scored[:4] = False
    scores = Scores(values * scored, scored, ("a", "b"))
    chain = (Standardize(), Sum(partial=True), Standardize("batch", centre="batch"))
    context = Context(columns((4,)), torch.ones(2))
    assert (
        Estimator(chain).summed(scores, context).mask[..., 0].any(1).tolist()
        == [False] * 4 + [True] * 4
    )
    scored[5:, 0] = False
    alone, made = Scores(values * scored, scored, ("a", "b")), Estimator((LeaveOneOut(),))
    assert made.summed(alone, context).mask[..., 0].any(1)[4], (
        "one sample with all scores is no failure"
    )
    assert not made(alone, context)[1].any(), "but it has nobody to compare with"


def test_more_samples_than_the_group_has_are_refused():
    with pytest.raises(UserError, match="of a group of 4"):
        kept((MaxVariance(9),), torch.rand(8), 4)
