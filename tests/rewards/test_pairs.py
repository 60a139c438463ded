"""Which pairs are judged, and what verdicts say of samples."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from rewards import Samples, check_reward, load
from rewards.catalogue.win_rate import Tournament
from rewards.judging.pairs import PairBudget, bradley_terry, win_rates


def samples(*sizes: int, prompts: list[str] | None = None) -> Samples:
    """Groups of these sizes, ids 0, 1, ...; a prompt each."""
    group = [g for g, size in enumerate(sizes) for _ in range(size)]
    texts = prompts or [f"prompt {g}" for g in range(len(sizes))]
    return Samples(["x"] * len(group), [texts[g] for g in group], torch.tensor(group))


def degrees(pairs: list[tuple[int, int]], n: int) -> np.ndarray:
    return np.bincount(np.array(pairs).flatten(), minlength=n)


def is_connected(pairs: list[tuple[int, int]], n: int) -> bool:
    a, b = np.array(pairs).T
    parts, _ = connected_components(coo_array((np.ones(len(a)), (a, b)), (n, n)), directed=False)
    return parts == 1


@given(st.integers(2, 25), st.integers(2, 9), st.integers(0, 99))
def test_each_sample_stands_in_the_same_number_of_pairs(n, count, seed):
    pairs = PairBudget("each", count).design_of(n, random.Random(seed))
    assert len({frozenset(pair) for pair in pairs}) == len(pairs), "no pair twice"
    assert all(a != b for a, b in pairs)
    met = degrees(pairs, n)
    wanted = min(count, n - 1)
    assert met.min() == wanted
    odd = n * wanted % 2
    assert met.max() == wanted + odd and met.sum() == n * wanted + odd
    assert is_connected(pairs, n)
    if count < n - 1 and count % 2 == 0:
        assert (np.bincount([a for a, _ in pairs], minlength=n) == count // 2).all()


@given(st.integers(2, 25), st.integers(1, 6), st.integers(0, 99))
def test_anchors_meet_everybody(n, count, seed):
    pairs = PairBudget("anchors", count).design_of(n, random.Random(seed))
    m = min(count, n - 1)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == m * (n - m) + m * (m - 1) // 2
    met = degrees(pairs, n)
    assert (met == n - 1).sum() >= m and is_connected(pairs, n)


def test_a_design_belongs_to_the_prompt_and_not_to_the_batch():
    budget = PairBudget("each", 2, seed=3)
    alone = budget.pairs(samples(7, prompts=["a cat"]))
    a, b = budget.pairs(samples(4, 7, prompts=["a dog", "a cat"]))
    mine = a >= 4
    assert torch.equal(a[mine] - 4, alone[0]) and torch.equal(b[mine] - 4, alone[1])
    other = budget.pairs(samples(7, prompts=["a cow"]))
    assert not torch.equal(other[0], alone[0])
    assert not torch.equal(
        PairBudget("each", 2, seed=4).pairs(samples(7, prompts=["a cat"]))[0], other[0]
    )


def test_all_pairs_are_those_of_the_plain_win_rate():
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def judge(s: Samples, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append((a, b))
        p = torch.rand(len(a), generator=torch.Generator().manual_seed(0))
        return torch.where(p < 0.2, torch.nan, p)

    batch = samples(4, 1, 5)
    ours = Tournament(judge, PairBudget())(batch)
    ((a, b),) = seen
    same = batch.group[:, None] == batch.group[None, :]
    assert torch.equal(torch.stack([a, b], 1), torch.nonzero(same.triu(1)))
    p = judge(batch, a, b).double()
    for row in range(10):
        own = torch.cat([p[a == row], 1 - p[b == row]])
        torch.testing.assert_close(ours[row], own.nanmean(), rtol=0, atol=1e-12, equal_nan=True)
    assert ours[4].isnan(), "alone in its group"


def test_win_rates_leave_out_what_has_no_verdict():
    a, b = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])
    got = win_rates(4, a, b, torch.tensor([1.0, torch.nan, 0.25]))
    assert got[:3].tolist() == [1.0, 0.125, 0.75] and got[3].isnan()


@pytest.mark.parametrize("won", [0.0, 1.0, 3.5, 5.0])
def test_two_players_solve_one_equation(won):
    """d/dt of log-likelihood and prior at strengths t, -t: won - 5 s(2t) + c - 2c s(t) = 0."""
    played, prior = 5, 0.7
    verdicts = torch.tensor([won / played] * played)
    zeros = torch.zeros(played, dtype=torch.long)
    t = bradley_terry(2, zeros, zeros + 1, verdicts, prior)
    assert t.sum().abs() < 1e-7
    s = torch.sigmoid
    residual = won - played * s(2 * t[0]) + prior - 2 * prior * s(t[0])
    assert abs(float(residual)) < 1e-7
    assert torch.sign(t[0]) == math.copysign(1, won - 2.5)


def test_a_weak_prior_leaves_the_logit_of_the_share():
    zeros = torch.zeros(4, dtype=torch.long)
    t = bradley_terry(2, zeros, zeros + 1, torch.tensor([1.0, 1.0, 1.0, 0.0]), 1e-6)
    assert float(t[0] - t[1]) == pytest.approx(math.log(3), abs=1e-4)


@pytest.mark.slow
@given(st.integers(2, 8), st.integers(0, 10_000), st.sampled_from([0.1, 0.5, 2.0]))
def test_strengths_maximise_what_the_docstring_says(n, seed, prior):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 3 * n))
    a = rng.integers(0, n, count)
    b = (a + rng.integers(1, n, count)) % n
    p = rng.random(count).round(1)
    p[rng.random(count) < 0.1] = np.nan
    known = ~np.isnan(p)

    def loss(t: np.ndarray) -> float:
        apart = (t[a] - t[b])[known]
        q = p[known]
        games = q * np.logaddexp(0, -apart) + (1 - q) * np.logaddexp(0, apart)
        return games.sum() + prior * (np.logaddexp(0, t) + np.logaddexp(0, -t)).sum()

    best = minimize(loss, np.zeros(n), method="BFGS", options={"gtol": 1e-9})
    met = np.bincount(np.concatenate([a[known], b[known]]), minlength=n) > 0
    got = bradley_terry(n, *map(torch.tensor, (a, b, p)), prior).numpy()
    np.testing.assert_allclose(got[met], best.x[met], atol=1e-5)
    assert np.isnan(got[~met]).all()


def test_who_wins_all_is_first_and_finite():
    order = [2, 0, 3, 1]
    a, b = torch.tensor([(i, j) for i in range(4) for j in range(i + 1, 4)]).T
    p = torch.tensor(
        [float(order[i] < order[j]) for i, j in zip(a.tolist(), b.tolist(), strict=True)]
    )
    t = bradley_terry(4, a, b, p)
    assert t.isfinite().all() and t.argsort(descending=True).tolist() == [1, 3, 0, 2]
    assert bradley_terry(4, b, a, 1 - p).tolist() == pytest.approx(t.tolist())


def test_it_is_a_reward_made_of_a_judge_by_its_settings():
    spec = {"judge": {"name": "brightness"}, "pairs": "each", "count": 2, "score": "bradley_terry"}
    reward = load("win_rate", **spec)
    gray = torch.linspace(0, 1, 5).view(5, 1, 1, 1).expand(5, 3, 4, 4)
    scores = reward(Samples(gray, ["x"] * 5, torch.zeros(5, dtype=torch.long)))
    assert scores[4] > 0 > scores[0], "who won, or lost, all its games"
    assert scores[1] < scores[3] and abs(float(scores.sum())) < 1e-6
    full = load("win_rate", judge="brightness")
    assert full(Samples(gray, ["x"] * 5, torch.zeros(5, dtype=torch.long))).tolist() == [
        0, 0.25, 0.5, 0.75, 1,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": "some"}, "pairs: expected 'all', 'each' or 'anchors', not 'some'"),
        ({"pairs": "each", "count": 1}, "count of at least 2"),
        ({"pairs": "anchors"}, "count of at least 1"),
        ({"count": 3}, "all takes no count"),
        ({"score": "elo"}, "score: expected 'win_rate' or 'bradley_terry'"),
        ({"prior": 0.0}, "prior: expected a number greater than 0"),
    ],
)
def test_slips_are_told(settings, message):
    with pytest.raises(ValueError, match=message):
        load("win_rate", judge="brightness", **settings)
    with pytest.raises(ValueError, match="did you mean 'brightness'"):
        check_reward("win_rate", {"judge": {"name": "brightnes"}})
