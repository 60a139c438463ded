"""Rewards that apply to some samples only: totals, credit, and every number made of them.

The reference is plain Python floats. A score is a number, FAILED, or None: it does not apply.
"""

import math
import random
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.budget.groups import Groups
from flowrl.budget.spending import Rationed, RoundOutcome, RoundScores
from flowrl.contrib.dense_grpo import StepGain
from flowrl.contrib.potential_tree import Potential
from flowrl.contrib.text_riskpo import ScoreQuantiles
from flowrl.contrib.turning_point import TurningPoint
from flowrl.contrib.vgpo import Discounted
from flowrl.credit.advantages import Estimator, LeaveOneOut, Standardize, Sum
from flowrl.credit.comparisons import BestWorst
from flowrl.credit.proxies import doubt
from flowrl.credit.success import MaxRL
from flowrl.credit.trackers import PromptValues, draw_means
from flowrl.credit.values import Context, node_values
from flowrl.iteration.credit import handle_failures, score_metrics
from flowrl.iteration.score import joined_columns, plan_scores
from flowrl.paths import PROJECT
from flowrl.prompts import Draws
from flowrl.settings.sections.budget import BudgetSettings
from rewards import Samples, Scores
from rewards.checks.gradient_test import Agreement
from rewards.combine import score_all
from rewards.types import IntermediateScores
from samplers import Columns

FAILED = "failed"
Cell = float | str | None
Table = Sequence[Sequence[Cell]]


def scores(table: Table) -> Scores:
    """Scores as rewards return them: a list with None where they do not apply."""
    names = [f"r{i}" for i in range(len(table[0]))]
    given_ = {
        name: (lambda _, i=i: [math.nan if row[i] == FAILED else row[i] for row in table])
        for i, name in enumerate(names)
    }
    n = len(table)
    shown = Samples(torch.zeros(n, 2), ["p"] * n, torch.zeros(n, dtype=torch.long))
    return score_all(given_, shown)


def total(row: Sequence[Cell], weights: Sequence[float]) -> float | None:
    """The rule, in words: None with a failure of a reward that applies, or if none applies."""
    if FAILED in row or all(cell is None for cell in row):
        return None
    return sum(w * float(cell) for w, cell in zip(weights, row, strict=True) if cell is not None)


def groups_of(values: Sequence[float | None], group: int) -> list[list[float | None]]:
    return [list(values[i : i + group]) for i in range(0, len(values), group)]


def standardized(values: Sequence[float | None], group: int) -> list[float | None]:
    found: list[float | None] = []
    for own in groups_of(values, group):
        known = [x for x in own if x is not None]
        mean = sum(known) / max(len(known), 1)
        std = math.sqrt(sum((x - mean) ** 2 for x in known) / max(len(known), 1))
        found += [
            None if x is None else (x - mean) / (std + 1e-4) if std > 1e-9 else 0.0 for x in own
        ]
    return found


def drawn(seed: int, rewards: int, group: int, draws: int) -> list[list[Cell]]:
    """Random cells; each reward scores the first sample of every group."""
    rng, table = random.Random(seed), list[list[Cell]]()
    for i in range(draws * group):
        cells: list[Cell] = [rng.uniform(-2, 3) for _ in range(rewards)]
        if i % group:
            cells = [rng.choice([c, c, c, None, None, FAILED]) for c in cells]
        table.append(cells)
    return table


def columns(group: int, points: int = 1) -> Columns:
    ones = (1.0,) * points
    return Columns((group,) * points, (True,) * points, ones, ones)


def context(group: int, weights: Sequence[float], points: int = 1, **more: Any) -> Context:
    return Context(columns(group, points), torch.tensor(weights, dtype=torch.float64), **more)


@given(st.integers(0, 999), st.integers(1, 3), st.integers(2, 5))
def test_totals_and_advantages_follow_the_rule(seed, rewards, group):
    table, weights = drawn(seed, rewards, group, 3), [1.0, -0.5, 2.0][:rewards]
    made = scores(table)
    want = [total(row, weights) for row in table]
    got = made.totals(torch.tensor(weights, dtype=torch.float64)).tolist()
    assert [None if x != x else x for x in got] == pytest.approx(want)
    value, mask = Estimator((Standardize(),))(made, context(group, weights))
    learned = [v if m else None for v, m in zip(value[:, 0].tolist(), mask[:, 0], strict=True)]
    assert learned == pytest.approx(standardized(want, group), abs=1e-9)


@given(st.integers(0, 999), st.integers(2, 5))
def test_rewards_normalized_one_by_one_are_compared_where_they_apply(seed, group):
    """GDPO's first steps: each reward over the samples of the group that it scored, then the sum;
    a missing one adds nothing, whatever it is missing for."""
    table, weights = drawn(seed, 2, group, 2), [1.0, 0.5]
    each = [
        standardized([c if isinstance(c, float) else None for c in column], group)
        for column in zip(*table, strict=True)
    ]
    want = [
        None if a is None and b is None else weights[0] * (a or 0.0) + weights[1] * (b or 0.0)
        for a, b in zip(*each, strict=True)
    ]
    chain = (Standardize(), Sum(partial=True))
    value, mask = Estimator(chain)(scores(table), context(group, weights))
    got = [v if m else None for v, m in zip(value[:, 0].tolist(), mask[:, 0], strict=True)]
    assert got == pytest.approx(want, abs=1e-9)
    # with the plain sum a failure masks its sample, and an abstention does not
    _, mask = Estimator((Standardize(), Sum()))(scores(table), context(group, weights))
    assert mask[:, 0].tolist() == [total(row, weights) is not None for row in table]


def test_a_node_s_value_is_the_mean_of_its_leaves_totals():
    table = [[1.0, None], [1.0, 2.0], [None, 4.0], [None, None]]
    tree = Columns((2, 4), (True, True), (1.0, 1.0), (1.0, 1.0))
    value, mask = Estimator((Sum(),))(
        scores(table), Context(tree, torch.ones(2, dtype=torch.float64))
    )
    assert value.tolist() == [[2.0, 1.0], [2.0, 3.0], [4.0, 4.0], [4.0, 0.0]]
    assert mask.tolist() == [[True, True], [True, True], [True, True], [True, False]]
    best, _ = Estimator((Sum(),), "max")(
        scores(table), Context(tree, torch.ones(2, dtype=torch.float64))
    )
    assert best[:, 0].tolist() == [3.0, 3.0, 4.0, 4.0], "of each reward, over leaves it applies to"


def test_a_failure_is_no_abstention():
    table = [[1.0, 5.0], [2.0, FAILED], [3.0, None], [None, FAILED]]
    value, mask = Estimator((Sum(),))(scores(table), context(4, [1.0, 1.0]))
    assert mask[:, 0].tolist() == [True, False, True, False]
    assert value[:, 0].tolist() == [6.0, 0.0, 3.0, 0.0]
    made = scores(table)
    assert made.unscored == {"r0": 0, "r1": 2} and made.outside.tolist() == [False] * 4
    # a reward that failed wherever it applies leaves samples of that reward alone without a total
    _, mask = Estimator((Sum(),))(scores([[None, FAILED]] * 2), context(2, [1.0, 1.0]))
    assert not mask.any()


# Every number that is made of totals: with a reward that abstains from some samples it is the same
# as with a single reward whose score is the total.

TABLE: list[list[Cell]] = [
    [0.5, 1.0], [0.25, None], [None, 0.75], [0.0, 0.5],
    [None, 0.5], [None, 0.25], [None, 1.0], [None, 0.0],
    [1.0, None], [0.5, None], [0.0, None], [0.75, None],
    [0.5, None], [None, None], [None, 1.0], [0.25, 0.25],
]  # fmt: skip
WEIGHTS = [1.0, 2.0]
PROMPTS = torch.tensor([0, 1, 2, 3])
SUM = ("reward", "reward_std", "flat_groups", "unscored", "unscored_share")


def estimated(*transforms: Any) -> Callable[[Scores, Tensor], Any]:
    def of(made: Scores, weights: Tensor) -> Any:
        found = Estimator(transforms)(made, Context(columns(4), weights, prompts=PROMPTS))
        return [part.tolist() for part in found]

    return of


def tracked(made: Scores, weights: Tensor) -> Any:
    values, of = PromptValues(), Context(columns(4), weights, prompts=PROMPTS)
    values.after(made, of)
    return values.state()


def bundled(made: Scores, weights: Tensor) -> Any:
    quantiles = ScoreQuantiles(2)
    quantiles.after(made.arranged(lambda c: c[:8]), Context(columns(4), weights))
    return quantiles.state()


def outcome(made: Scores, weights: Tensor) -> RoundOutcome:
    draws = Draws((0, 1, 2, 3), (0, 1, 2, 3), (1, 1, 1, 1))
    return RoundOutcome(draws, made, made.totals(weights), range(4), True, 0)


def rates(made: Scores, weights: Tensor) -> Any:
    budget = Rationed(BudgetSettings(rates=(0.1, 0.9), success=1.0), 4)
    _, learned = budget.scored(SimpleNamespace(plan="p"), outcome(made, weights))
    return budget.rates.state(), learned.totals(weights).tolist()


def worth(made: Scores, weights: Tensor) -> Any:
    budget = Rationed(BudgetSettings(flat="resample", rounds=2), 4)
    found = RoundScores(outcome(made, weights).draws, (made.totals(weights),))
    return budget._worth([found]).tolist()


def padded(made: Scores, weights: Tensor) -> Any:
    """Groups of one, two and one draws."""
    groups = Groups((1, 2, 1), 4)
    whole = groups.scores(made)
    return whole.totals(weights)[groups.index].tolist()


def recorded(made: Scores, weights: Tensor) -> Any:
    metrics = score_metrics(made, weights, 4)
    return {name: metrics[name] for name in SUM}


def agreement(made: Scores, weights: Tensor) -> Any:
    plain = made.totals(weights)
    return Agreement.of(plain, plain.nan_to_num(0.0) ** 3)


CONSUMERS: dict[str, Callable[[Scores, Tensor], Any]] = {
    "totals": lambda made, weights: made.totals(weights).tolist(),
    "plan_scores": lambda made, weights: plan_scores(made, made, weights).totals.tolist(),
    "joined processes": lambda m, w: Scores.joined([m, m]).totals(w).tolist(),
    "moved rows": lambda m, w: m.arranged(lambda c: c.flip(0)).totals(w).tolist(),
    "columns of several rewards": lambda m, w: joined_columns(
        [m.of([i]) for i in reversed(range(len(m.names)))], m.names
    ).totals(w).tolist(),
    "the log": recorded,
    "sum": estimated(Sum()),
    "grpo": estimated(Standardize()),
    "over the batch": estimated(Standardize("batch", centre="batch")),
    "leave one out": estimated(LeaveOneOut()),
    "best and worst": estimated(BestWorst()),
    "success": estimated(MaxRL()),
    "means of draws": lambda m, w: [
        part.tolist() for part in draw_means(m, Context(columns(4), w))
    ],
    "values of prompts": tracked,
    "quantiles of bundles": bundled,
    "rates of success": rates,
    "groups worth training on": worth,
    "padded groups": padded,
    "checks of gradients": agreement,
}  # fmt: skip


@pytest.mark.parametrize("name", CONSUMERS)
def test_a_number_made_of_totals_is_that_of_the_totals(name):
    several, weights = scores(TABLE), torch.tensor(WEIGHTS, dtype=torch.float64)
    single = scores([[total(row, WEIGHTS)] for row in TABLE])
    consume = CONSUMERS[name]
    got = consume(several, weights)
    want = consume(single, torch.ones(1, dtype=torch.float64))
    assert str(got) == str(want)  # NaN equals NaN


def test_no_other_place_asks_whether_all_rewards_scored():
    """`Scores.complete` is the one place that knows what a total needs."""
    asks = re.compile(r"scored(\.cpu\(\))?(\[[^\]]*\])?\.all\(")
    allowed = {
        "flowrl/credit/proxies.py",  # the rewards that a gate names, each of which must have scored
        "rewards/types.py",
    }
    found = set[str]()
    for room in ("flowrl", "rewards"):
        for path in (PROJECT / room).rglob("*.py"):
            if asks.search(path.read_text(encoding="utf-8")):
                found.add(path.relative_to(PROJECT).as_posix())
    assert found <= allowed


def test_means_of_rewards_are_over_the_samples_to_which_they_apply():
    metrics = score_metrics(scores(TABLE), torch.tensor(WEIGHTS, dtype=torch.float64), 4)
    for i in range(2):
        known = [float(row[i]) for row in TABLE if isinstance(row[i], float)]
        mean = sum(known) / len(known)
        assert metrics[f"reward/r{i}"] == pytest.approx(mean)
        spread = math.sqrt(sum((x - mean) ** 2 for x in known) / len(known))
        assert metrics[f"reward_std/r{i}"] == pytest.approx(spread)
        assert metrics[f"applies/r{i}"] == len(known) / len(TABLE)
    assert metrics["abstained"] == 1 and metrics["abstained_share"] == 1 / 16
    every = [[1.0, 2.0], [3.0, 4.0]]
    names = set(score_metrics(scores(every), torch.ones(2), 2))
    assert not {n for n in names if n.startswith(("applies", "abstained"))}, "as before"


@pytest.mark.parametrize("missing", [None, FAILED])
def test_a_sample_without_a_total_gives_a_group_no_spread(missing):
    table = [[1.0], [missing], [1.0], [-2.0], [-2.0], [missing], [3.0], [missing], [4.0]]
    assert score_metrics(scores(table), torch.ones(1), 3)["flat_groups"] == pytest.approx(2 / 3)


def test_a_reward_that_applies_nowhere_has_no_mean():
    metrics = score_metrics(scores([[1.0, None], [3.0, None]]), torch.ones(2), 2)
    assert metrics["reward"] == 2 and metrics["unscored"] == 0 and metrics["applies/r1"] == 0
    assert "reward/r1" not in metrics and "reward_std/r1" not in metrics
    alone = score_metrics(scores([[None], [None]]), torch.ones(1), 2)
    assert "reward" not in alone and alone["abstained"] == 2 and alone["flat_groups"] == 1


def test_groups_to_which_no_reward_applies_are_no_failure():
    def handled(table: Table, skip: bool) -> None:
        made = scores(table)
        mask = node_values(made.terms, context(2, [1.0] * len(table[0]))).mask
        handle_failures(made, mask.any(-1).any(1).view(-1, 2).any(1), skip)

    handled([[None]] * 4, False)
    handled([[1.0], [2.0], [None], [None]], False)
    with pytest.raises(Exception, match=r"1 of 2 groups have no score; fix"):
        handled([[1.0], [2.0], [FAILED], [FAILED]], False)
    handled([[1.0], [2.0], [FAILED], [FAILED]], True)
    for skip in (False, True):
        with pytest.raises(Exception, match=r"reward r0 scored nothing\); fix"):
            handled([[None], [None], [FAILED], [FAILED]], skip)


def test_a_gate_compares_where_its_rewards_apply():
    table = [[1.0, 1.0], [2.0, None], [3.0, 0.0], [4.0, 2.0]]
    u, known = doubt(scores(table), torch.tensor([1.0, 0.0]), ["r1"])
    assert known.tolist() == [True, False, True, True]
    alone = [row for row in table if row[1] is not None]
    assert torch.equal(u, doubt(scores(alone), torch.tensor([1.0, 0.0]), ["r1"])[0])


def way(table: Table, first: Table) -> Scores:
    """Scores of samples with two steps, whose states before them score as in `first`."""
    made, early = scores(table), scores(first)
    values = torch.stack([early.values, early.values / 2], 1)
    scored = torch.stack([early.scored] * 2, 1)
    abstained = torch.stack([~early.applies] * 2, 1)
    seen = IntermediateScores(values, scored, abstained=abstained)
    return Scores(made.values, made.scored, made.names, seen, made.abstained)


@pytest.mark.parametrize(
    "transform", [StepGain(), TurningPoint(), Discounted(0.5)], ids=lambda t: type(t).__name__
)
def test_steps_of_a_sample_are_credited_by_the_rewards_that_apply_to_it(transform):
    """A second reward that applies to no sample of a group changes nothing there."""
    table = [[1.0, None], [0.5, None], [0.0, 1.0], [2.0, 3.0]]
    first = [[0.4, None], [0.6, None], [0.1, 0.2], [0.5, 0.7]]
    both = Estimator((transform, Sum(), Standardize()))(
        way(table, first), context(2, [1.0, 1.0], points=2)
    )
    of_one = [[[row[0]] for row in part[:2]] for part in (table, first)]
    one = Estimator((transform, Sum(), Standardize()))(way(*of_one), context(2, [1.0], points=2))
    for part, want in zip(both, one, strict=True):
        assert torch.equal(part[:2], want)


def test_a_potential_is_the_sum_of_the_rewards_that_apply_to_a_state():
    table, first = [[1.0, 1.0], [0.0, 1.0]], [[0.5, None], [0.25, None]]
    both = Estimator((Sum(), Potential()))(way(table, first), context(2, [1.0, 5.0], points=2))
    alone = way([[1.0], [0.0]], [[0.5], [0.25]]).intermediate
    assert alone is not None
    made = scores(table)
    seen = alone._replace(weights=torch.tensor([1.0], dtype=torch.float64))
    one = Scores(made.values, made.scored, made.names, seen)
    want = Estimator((Sum(), Potential()))(one, context(2, [1.0, 5.0], points=2))
    assert torch.equal(both[0], want[0])
