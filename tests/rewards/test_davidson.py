"""The model of votes: against an independent Newton, scikit-learn, and a long chain."""

import math

import numpy as np
import pytest
from scipy import optimize

from rewards.fitted.davidson import (
    LOG_NU_SD,
    SIDE_SD,
    VoteModel,
    Votes,
    fit_votes,
    log_loss,
)


def drawn(p: int, d: int, seed: int, ties: float = 0.3, side: float = 0.4) -> Votes:
    """Votes drawn from the model itself, with sides."""
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(p, d)), rng.normal(size=d)
    shown = rng.choice([-1.0, 1.0], p)
    m = x @ w + side * shown
    weights = np.stack([np.exp(m / 2), np.exp(-m / 2), np.full(p, 2 * ties)], 1)
    chance = weights / weights.sum(1, keepdims=True)
    verdict = np.array([rng.choice(3, p=row) for row in chance])
    return Votes.of(x, np.array([1.0, 0.0, 0.5])[verdict], shown)


def newton(votes: Votes, ridge: float) -> np.ndarray:
    """(w, beta, log nu) in the full space, by Newton's method on the density written out again,
    with derivatives in closed form for each verdict."""
    p, d = votes.x.shape
    columns = np.concatenate([votes.x, votes.side[:, None], np.zeros((p, 1))], 1)
    precision = np.array([ridge] * d + [1 / SIDE_SD**2, 1 / LOG_NU_SD**2])
    # the statistics of verdict v are rows of T_v: log weight of v = T_v theta
    nu = np.eye(d + 2)[d + 1]
    statistics = np.stack([columns / 2, -columns / 2, np.broadcast_to(nu, (p, d + 2))], 1)
    theta = np.zeros(d + 2)
    for _ in range(100):
        logs = statistics @ theta
        chance = np.exp(logs - logs.max(1, keepdims=True))
        chance /= chance.sum(1, keepdims=True)
        mean = np.einsum("pv,pvk->pk", chance, statistics)
        seen = np.einsum("pv,pvk->pk", votes.won, statistics)
        gradient = (mean - seen).sum(0) + precision * theta
        second = np.einsum("pv,pvk,pvl->kl", chance, statistics, statistics) - mean.T @ mean
        step = np.linalg.solve(second + np.diag(precision), gradient)
        theta = theta - step / max(1.0, np.abs(step).max())
        if np.abs(step).max() < 1e-14:
            break
    return theta


@pytest.mark.parametrize(("p", "d", "ridge"), [(200, 5, 0.3), (40, 90, 2.0), (300, 20, 1e-3)])
def test_with_ties_it_is_an_independent_newtons_fit(p, d, ridge):
    votes = drawn(p, d, seed=p)
    found, wanted = fit_votes(votes, ridge), newton(votes, ridge)
    near = {"rtol": 0, "atol": 1e-12}  # the trust region alone ends 1e-11 away
    np.testing.assert_allclose(found.weight, wanted[:d], **near)
    np.testing.assert_allclose([found.beta, found.log_nu], wanted[d:], **near)


@pytest.mark.slow  # its import takes seconds
@pytest.mark.parametrize(("p", "d", "ridge"), [(150, 4, 0.7), (30, 60, 1.0)])
def test_without_ties_and_sides_it_is_scikit_learns_logistic_regression(p, d, ridge):
    linear = pytest.importorskip("sklearn.linear_model")
    votes = drawn(p, d, seed=1, ties=0.0, side=0.0)
    votes = Votes.of(votes.x, votes.won[:, 0])
    found = fit_votes(votes, ridge)
    theirs = linear.LogisticRegression(
        C=1 / ridge, fit_intercept=False, solver="newton-cholesky", tol=1e-14, max_iter=1000
    ).fit(votes.x, votes.won[:, 0])
    np.testing.assert_allclose(found.weight, theirs.coef_[0], rtol=0, atol=1e-8)
    assert (found.beta, found.log_nu) == (0.0, -np.inf)


def test_without_ties_it_is_a_minimum_that_another_solver_finds():
    votes = drawn(120, 6, seed=4, ties=0.0, side=0.0)
    votes = Votes.of(votes.x, votes.won[:, 0])
    sign = 2 * votes.won[:, 0] - 1

    def loss(w):
        return np.logaddexp(0, -sign * (votes.x @ w)).sum() + 0.25 * w @ w

    wanted = optimize.minimize(loss, np.zeros(6), method="BFGS", options={"gtol": 1e-9}).x
    np.testing.assert_allclose(fit_votes(votes, 0.5).weight, wanted, atol=1e-6)


def test_the_probabilities_are_davidsons():
    model = VoteModel(np.array([2.0]), 0.5, np.log(0.8), 1.0, np.ones((1, 1)), np.ones((1, 1)))
    worth_a, worth_b = math.exp(1.5 * 2 / 2 + 0.25), math.exp(-1.5 * 2 / 2 - 0.25)
    total = worth_a + worth_b + 0.8 * math.sqrt(worth_a * worth_b)
    wanted = [worth_a / total, worth_b / total, 0.8 / total]
    np.testing.assert_allclose(model.verdicts(np.array([[1.5]]), 1.0)[0], wanted, rtol=1e-14)


def chains(votes: Votes, ridge: float, count: int, steps: int) -> np.ndarray:
    """Draws of theta from the exact posterior, by random-walk Metropolis: many chains that begin
    around the mode, without their first quarter."""
    rng = np.random.default_rng(0)
    d = votes.x.shape[1]
    theta = newton(votes, ridge) + rng.normal(0, 0.1, (count, d + 2))
    precision = np.array([ridge] * d + [1 / SIDE_SD**2, 1 / LOG_NU_SD**2])

    def density(theta):
        m = theta[:, :d] @ votes.x.T + theta[:, d : d + 1] * votes.side
        nu = np.broadcast_to(theta[:, d + 1 :], m.shape)
        norm = np.logaddexp(np.logaddexp(m / 2, -m / 2), nu)
        logs = [m / 2 - norm, -m / 2 - norm, nu - norm]
        likely = sum((log * won).sum(1) for log, won in zip(logs, votes.won.T, strict=True))
        return likely - (precision * theta**2).sum(1) / 2

    draws, at = [], density(theta)
    for _ in range(steps):
        other = theta + rng.normal(0, 0.14, theta.shape)
        there = density(other)
        taken = np.log(rng.random(count)) < there - at
        theta, at = np.where(taken[:, None], other, theta), np.where(taken, there, at)
        draws.append(theta)
    return np.concatenate(draws[steps // 4 :])


@pytest.mark.slow
def test_the_posterior_is_that_of_a_long_chain():
    votes, ridge = drawn(250, 2, seed=3), 1.0
    draws = chains(votes, ridge, count=100, steps=600)[:, :2]
    model = fit_votes(votes, ridge)
    x = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0], [0.5, 2.0]])
    deviation = model.deviation(x)
    np.testing.assert_allclose(deviation, (x @ draws.T).std(1), rtol=0.06)
    assert (np.abs(x @ model.weight - (x @ draws.T).mean(1)) < 0.3 * deviation).all()


def test_outside_of_what_votes_span_the_posterior_is_the_prior():
    x = np.zeros((20, 3))
    x[:, 0] = np.linspace(-1, 1, 20)
    model = fit_votes(Votes.of(x, (x[:, 0] > 0).astype(float)), ridge=4.0)
    along, across, _ = model.deviation(np.eye(3))
    assert across == pytest.approx(0.5) and along < 0.5


@pytest.mark.parametrize(
    ("label", "side"), [([0.5] * 6, 0), ([1.0], 0), ([1.0] * 6, 1), ([0.5], 1), ([0.0, 1.0], 0)]
)
def test_only_ties_one_vote_and_one_side_have_a_finite_fit(label, side):
    x = np.random.default_rng(0).normal(size=(len(label), 3))
    model = fit_votes(Votes.of(x, np.array(label), np.full(len(label), side)), 1.0)
    assert np.isfinite([*model.weight, model.beta]).all()
    assert np.isfinite(model.log_nu) == (0.5 in label)
    if set(label) == {0.5}:
        assert model.log_nu > 1 and not model.weight.any(), "rounding is no preference either"
    assert np.isfinite(model.deviation(x)).all()


def test_equal_samples_have_a_fit_with_the_priors_deviation():
    model = fit_votes(Votes.of(np.zeros((3, 2)), np.array([1.0, 0.0, 0.5])), 4.0)
    assert not model.weight.any()
    np.testing.assert_allclose(model.deviation(np.eye(2)), 0.5)


def test_no_vote_and_wrong_labels_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="no vote to fit: all pairs were skipped"):
        fit_votes(Votes.of(np.zeros((0, 2)), np.zeros(0)), 1.0)
    with pytest.raises(ValueError, match=r"labels in 0\.\.1"):
        Votes.of(np.zeros((1, 2)), np.array([1.5]))
    with pytest.raises(ValueError, match="do not fit"):
        Votes.of(np.zeros((2, 2)), np.array([1.0]))
    with pytest.raises(ValueError, match="ridge must be a positive"):
        fit_votes(drawn(5, 2, 0), 0.0)


def test_a_share_of_voters_is_divided_between_the_winners():
    x = np.array([[1.0]] * 4)
    shares = fit_votes(Votes.of(x[:1].repeat(4, 0), np.full(4, 0.75)), 0.1)
    counted = fit_votes(Votes.of(x, np.array([1.0, 1.0, 1.0, 0.0])), 0.1)
    np.testing.assert_allclose(shares.weight, counted.weight, atol=1e-9)


def test_a_tie_that_the_fit_has_not_seen_costs_half_of_each_winner():
    model = fit_votes(Votes.of(np.array([[1.0], [-1.0]]), np.array([1.0, 0.0])), 1.0)
    tie = Votes.of(np.array([[0.7]]), np.array([0.5]))
    m = 0.7 * model.weight[0]
    wanted = (np.logaddexp(0, -m) + np.logaddexp(0, m)) / 2
    np.testing.assert_allclose(log_loss(model, tie), wanted, rtol=1e-12)


def test_a_fit_that_starts_from_another_ridges_fit_ends_at_the_same_place():
    votes = drawn(100, 8, seed=9)
    cold = fit_votes(votes, 0.1)
    warm = fit_votes(votes, 0.1, start=fit_votes(votes, 10.0))
    np.testing.assert_allclose(warm.weight, cold.weight, atol=1e-9)


def test_a_far_start_ends_at_the_same_place():
    """Votes that nearly separate have a far fit at a weak ridge."""
    for seed in range(15):
        rng = np.random.default_rng(seed)
        p, d = int(rng.integers(2, 30)), int(rng.integers(1, 10))
        x = rng.normal(size=(p, d)) * 10 ** rng.uniform(-2, 3)
        votes = Votes.of(x, rng.choice([0, 0.5, 1], p, p=[0.3, 0.1, 0.6]), rng.choice([-1.0, 1], p))
        far = fit_votes(votes, 1e-4)
        warm, cold = fit_votes(votes, 100.0, start=far), fit_votes(votes, 100.0)
        np.testing.assert_allclose(warm.weight, cold.weight, rtol=0, atol=1e-10)
        assert (warm.beta, warm.log_nu) == pytest.approx((cold.beta, cold.log_nu), abs=1e-9)
