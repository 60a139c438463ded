"""What budgets decide, by hand and by exhaustion: groups, rates, draws, what is replayed."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.budget.groups import Groups
from flowrl.budget.knapsack import gain, knapsack
from flowrl.budget.rates import Difficulty, Rates
from flowrl.budget.spending import LATER_ROUNDS, DrawRequest, Rationed, RoundScores, open_budget
from flowrl.budget.successes import Success, Successes, cut, put, signature
from flowrl.credit.advantages import Context, Estimator, Standardize
from flowrl.errors import UserError
from flowrl.likelihoods.rows import Evaluation, Rows, stacked, trimmed
from flowrl.prompts import Draws, PromptSet
from flowrl.recipes import RECIPES
from flowrl.settings import BudgetSettings
from rewards import Scores
from tests.support.golden_tools import columns

PROMPTS = PromptSet(tuple("abcdef"), tuple({} for _ in range(6)))


def call(iteration: int = 0, count: int = 3, weights: Tensor | None = None) -> DrawRequest:
    return DrawRequest(PROMPTS, count, 0, iteration, weights)


def found(draws: Draws, *groups: list[float]) -> RoundScores:
    return RoundScores(draws, (torch.tensor([score for group in groups for score in group]),))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=5), st.integers(1, 3), st.integers(0, 99))
def test_credit_of_groups_of_many_sizes_is_that_of_each_by_itself(counts, size, seed):
    groups = Groups(tuple(counts), size)
    rng = torch.Generator().manual_seed(seed)
    value = torch.rand(sum(counts) * size, 1, generator=rng, dtype=torch.float64)
    scores = Scores(value, torch.ones(len(value), 1, dtype=torch.bool), ("r",))
    whole = Context(columns((size,)), torch.ones(1), prompts=torch.arange(sum(counts)))
    context = groups.context(whole, torch.arange(sum(counts)))
    assert context.prompts.tolist() == groups.first.tolist()
    got, mask = Estimator((Standardize("group", correction=1),))(groups.scores(scores), context)
    assert int(mask.sum()) == len(value)
    start = 0
    for count in counts:
        part = value[start : start + count * size]
        spread = part.std() if len(part) > 1 else torch.tensor(0.0)
        want = (part - part.mean()) / (spread + 1e-4)
        torch.testing.assert_close(got[groups.index][start : start + len(part)], want)
        start += len(part)


def test_the_example_of_groups():
    assert Groups((1, 2), 2).index.tolist() == [0, 1, 4, 5, 6, 7]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.integers(2, 4))
def test_a_knapsack_of_whole_draws_by_exhaustion(rates, unit):
    given_rates = torch.tensor(rates, dtype=torch.float64)
    counts = knapsack(given_rates, 3, 0, 3, unit)
    assert sum(counts) == 3

    def worth(some) -> float:
        return sum(float(gain(given_rates[i : i + 1], n * unit)) for i, n in enumerate(some))

    best = max(worth(some) for some in product(range(4), repeat=3) if sum(some) == 3)
    assert worth(counts) == pytest.approx(best, abs=1e-12)


def test_a_rate_follows_the_last_visits():
    rates, yes = Rates(), torch.ones(1, 4, dtype=torch.bool)
    assert rates.rate(7) == 0.5
    rates.learn([7], ~yes, yes, iteration=0)
    assert rates.known[7] == (pytest.approx(0.5 - 4 * 0.5 / (1 + 4)), 5.0, 0)
    assert rates.rate(1) == rates.rate(7), "what was never drawn counts as the mean"
    rates.learn([7], yes, yes, iteration=9)
    assert rates.known[7] == (pytest.approx(0.1 + 4 * 0.9 / (2.5 + 4)), 6.5, 9)
    rates.learn([7], yes, ~yes, iteration=10)
    assert rates.known[7][2] == 9, "no score, nothing learned"
    again = Rates()
    again.restore(rates.state())
    assert again == rates


def test_prompts_outside_of_the_range_come_last_and_come_again():
    rates = Rates({0: (0.0, 5.0, 3), 1: (1.0, 5.0, 3), 2: (0.5, 5.0, 3)})
    how = Difficulty(0.1, 0.9, revisit=10)
    order = rates.order(how, 5, torch.ones(4), (0, "prompts", 5))
    assert set(order[:2]) == {2, 3} and set(order[2:]) == {0, 1}
    firsts = [rates.order(how, 13, torch.ones(4), (0, "prompts", i))[0] for i in range(60)]
    assert set(firsts) == {0, 1, 2, 3}, "ten iterations later all may be drawn"
    seen = [[rates.guess(i, how, at) for i in (0, 1, 3)] for at in (12, 13)]
    assert seen == [[0.0, 1.0, 0.5], [0.5, 0.5, 0.5]], "forgotten, it counts as an even chance"
    sure = Difficulty(uncertain=True)
    firsts = [rates.order(sure, 5, torch.ones(4), (0, "x", i))[0] for i in range(400)]
    # the unknown one counts as 1/2 too: 0.05, 0.05, 0.55, 0.55
    assert firsts.count(2) / 400 == pytest.approx(0.55 / 1.2, abs=0.08)
    assert rates.order(sure, 5, torch.ones(4), (0, "x", 1)) == rates.order(
        sure, 5, torch.ones(4), (0, "x", 1)
    )


def test_rations_draw_on():
    assert open_budget(BudgetSettings(), 2) is None
    rationed = Rationed(BudgetSettings(flat="resample", rounds=3), 2)
    first = rationed.draws(call(2), [])
    assert first == PROMPTS.draw(2, 3, 0)
    rounds = [found(first, [0, 1], [1, 1], [0, 0])]
    second = rationed.draws(call(2), rounds)
    assert second.ids == tuple(LATER_ROUNDS + 6 + i for i in range(3))
    assert not set(second.rows) & set(first.rows), "others, while there are others"
    assert second == rationed.draws(call(2), rounds)
    rounds.append(found(second, [1, 1], [0, 1], [1, 1]))
    assert rationed.draws(call(2), rounds) is not None
    rounds[1] = found(second, [1, 0], [0, 1], [1, 0])
    assert rationed.draws(call(2), rounds) is None, "three differ, as wanted"
    assert rationed.kept(call(2), rounds).tolist() == [True, False, False, True, True, False]
    assert rationed.metrics()["budget/rounds"] == 2
    rounds = [found(first, [0, 0], [1, 1], [0, 0])] * 3
    assert rationed.draws(call(2), rounds) is None, "three rounds are the most"
    assert rationed.kept(call(2), rounds).tolist() == [True] * 3 + [False] * 6
    unsaid = found(first, [float("nan"), 1], [float("nan")] * 2, [0, 0.5])
    assert rationed.kept(call(2), [unsaid]).tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("flat", "groups", "learned"),
    [
        ("keep", ([0, 1], [1, 1], [0, 0]), 3),
        ("drop", ([0, 1], [1, 1], [0, 0]), 1),
        ("drop", ([0, 0], [1, 1], [0, 0]), 0),
        ("resample", ([0, 1], [1, 1], [0, 1]), 2),
        ("resample", ([0, 0], [1, 1], [0, 0]), 0),
    ],
)
def test_groups_that_are_masked_are_not_counted_as_kept(flat, groups, learned):
    rationed = Rationed(BudgetSettings(flat=flat), 2)
    rationed.kept(call(), [found(rationed.draws(call(), []), *groups)])
    metrics = rationed.metrics()
    assert (metrics["budget/drawn"], metrics["budget/kept"]) == (3, learned)


def test_draws_go_where_they_teach_and_are_one_group():
    rationed = Rationed(BudgetSettings(repeat=2), 2)
    rationed.rates.known = {i: (0.0 if i < 4 else 0.4, 5.0, 0) for i in range(6)}
    drawn = rationed.draws(call(count=6), [])
    assert sorted(drawn.rows).count(4) == sorted(drawn.rows).count(5) == 2
    assert sorted(drawn.merged) == [1, 1, 2, 2] and len(set(drawn.ids)) == 6
    at, again = drawn.rows.index(4), Rationed(BudgetSettings(repeat=2, flat="resample"), 2)
    assert drawn.rows[at : at + 2] == (4, 4)
    scores = [[0.0, 0.0] for _ in range(6)]
    scores[at + 1] = [1.0, 1.0]  # the two draws of prompt 4 differ from each other only
    kept = again.kept(call(count=6), [found(drawn, *scores)])
    assert kept.nonzero().flatten().tolist() == [at, at + 1]


def test_a_group_is_worth_it_whose_spread_exceeds_the_bound_under_any_plan():
    rationed = Rationed(BudgetSettings(flat="resample", spread=0.3), 2)
    draws = rationed.draws(call(), [])
    noisy = found(draws, [0.0, 0.5], [0.0, 0.7], [0.4, 0.4])  # stds 0.25, 0.35 and 0
    assert rationed.kept(call(), [noisy]).tolist() == [False, True, False]
    flat = torch.zeros(6)
    for totals in ((noisy.totals[0], flat), (flat, noisy.totals[0])):
        assert rationed.kept(call(), [RoundScores(draws, totals)]).tolist() == [False, True, False]


def test_a_group_of_several_draws_is_kept_as_a_whole_or_not():
    """Of four draws that are worth it three are wanted: the second group of two does not fit."""
    rationed = Rationed(BudgetSettings(flat="resample", repeat=2), 2)
    rounds = [
        found(Draws((0, 1, 2), (0, 0, 1), (2, 1)), [0, 1], [1, 1], [0, 0]),
        found(Draws((3, 4, 5), (2, 2, 3), (2, 1)), [0, 1], [1, 1], [0, 0]),
    ]
    assert rationed.kept(call(), rounds).tolist() == [True, True] + [False] * 4


def test_metrics_are_of_one_iteration():
    rationed = Rationed(BudgetSettings(flat="resample", rates=(0.2, 0.8)), 2)
    drawn = rationed.draws(call(), [])
    rationed.kept(call(), [found(drawn, [0, 1], [1, 1], [0, 0])])
    said = rationed.metrics()
    assert said["budget/outside"] == 0 and said["budget/kept"] == 1
    assert rationed.metrics() == {}


@dataclass(frozen=True)
class Part:
    x: Tensor
    prompt: Tensor


@dataclass(frozen=True)
class Drawn:
    plan: str
    prompt: Tensor
    x0: Tensor
    parts: tuple[Part, ...]
    none: Tensor | None = None


def drawn(seed: int) -> Drawn:
    rng = torch.Generator().manual_seed(seed)
    prompt = torch.tensor([0, 0, 1, 1])
    parts = tuple(Part(torch.rand(4, 2, generator=rng), prompt) for _ in range(2))
    return Drawn("plan", prompt, torch.rand(4, 3, generator=rng), parts)


def test_a_sample_is_cut_out_of_one_rollout_and_put_into_another():
    old, new = drawn(0), drawn(1)
    pieces = cut(old, 2)
    made = put(new, {1: pieces})
    assert torch.equal(made.x0[1], old.x0[2]) and torch.equal(made.parts[1].x[1], old.parts[1].x[2])
    others = [0, 2, 3]
    assert torch.equal(made.x0[others], new.x0[others])
    assert made.prompt is new.prompt and not torch.equal(new.x0[1], old.x0[2])
    assert signature(old) == signature(new) != signature(Drawn("other", *([old.prompt] * 2), ()))


def test_the_oldest_successes_make_room():
    kept = Successes(2)
    for prompt in (0, 1, 0, 2):
        kept.add(prompt, "p", Success(torch.ones(1), torch.ones(1).bool(), {"x": torch.ones(2)}))
    assert list(kept.kept) == [(0, "p"), (2, "p")]
    assert kept.of(0, "q") is None
    again = Successes(2)
    again.restore(kept.state())
    assert again.state() == kept.state() and list(again.kept) == list(kept.kept)


def test_rows_are_stacked_and_trimmed_by_units():
    mask = torch.tensor([[False], [True], [False], [False]])
    rows = Rows(torch.arange(4), torch.ones(4, 1), mask, Evaluation(torch.rand(4, 1), None))
    assert trimmed(rows, 1).prompt.tolist() == [1]
    pairs = trimmed(rows, 2)
    assert pairs.prompt.tolist() == [0, 1] and torch.equal(pairs.old.logp, rows.old.logp[:2])
    both = stacked([rows, pairs])
    assert both.prompt.tolist() == [0, 1, 2, 3, 0, 1] and both.old.out is None
    assert torch.equal(both.old.logp[4:], rows.old.logp[:2])


def algorithm(name: str, **settings):
    return RECIPES[name](**settings)


@pytest.mark.parametrize(
    ("budget", "recipe", "message"),
    [
        ({"subset": 99}, algorithm("text_grpo"), "subset is 99, but a group has only 64 samples"),
        ({"subset": 2}, algorithm("dpo"), "selects its own samples"),
        ({"subset": 2}, algorithm("text_tree"), "share steps"),
        ({"repeat": 2}, algorithm("text_dpo"), "come in pairs"),
        ({"replay": 2}, algorithm("branch_grpo"), "share steps"),
        ({"replay": 2}, algorithm("text_stream"), "keeps its own statistics of every prompt"),
        ({"flat": "resample"}, algorithm("text_riskpo"), "set budget.flat: drop"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else None,
)
def test_what_does_not_go_together_is_said(budget, recipe, message):
    with pytest.raises(UserError, match=message):
        BudgetSettings(**budget).around(recipe)


def test_rates_must_rise():
    with pytest.raises(ValueError, match="low < high"):
        BudgetSettings(rates=(0.9, 0.1))
