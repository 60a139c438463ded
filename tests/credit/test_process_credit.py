"""Process rewards standardised in a group and summed from each turn on, as the papers write it, in
plain loops."""

import numpy as np
import pytest
import torch

from flowrl.credit.advantages import Standardize
from flowrl.credit.process import GroupReturns, MinReturns
from tests.credit.test_turn_rewards import GROUP, K, N, credited, drawn

__all__ = ["drawn"]


def by_hand(drawn, gamma: float, with_outcome: bool) -> np.ndarray:
    """R holds all rewards of a group's turns; A_t is the discounted sum of (r - mean R) / std R."""
    outcome, turns, reward, _ = drawn
    found = np.zeros((N, K))
    for first in range(0, N, GROUP):
        members, rewards = range(first, first + GROUP), dict[tuple[int, int], float]()
        for i in members:
            for k in range(turns[i]):
                ends = with_outcome and k == turns[i] - 1
                if ends or not np.isnan(reward[i, k]):
                    own = 0.0 if np.isnan(reward[i, k]) else reward[i, k]
                    rewards[i, k] = own + (outcome[i] if ends else 0.0)
        every = list(rewards.values())
        mean, std = np.mean(every), np.std(every, ddof=1)
        for i in members:
            for k in range(turns[i]):
                found[i, k] = sum(
                    gamma ** (j - k) * (rewards[i, j] - mean) / (std + 1e-4)
                    for j in range(k, turns[i])
                    if (i, j) in rewards
                )
    return found


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("outcome", [True, False])
def test_advantages_are_sums_of_standardised_rewards(drawn, gamma, outcome):
    got = credited([GroupReturns(gamma, outcome)], drawn)
    np.testing.assert_allclose(got, by_hand(drawn, gamma, outcome), atol=1e-9)
    assert np.abs(got).max() > 0.5


def test_a_single_turn_with_its_outcome_is_grpo(drawn):
    outcome, turns, reward, states = drawn
    alone = outcome, np.ones_like(turns), np.full_like(reward, np.nan), states
    got = credited([GroupReturns()], alone)
    want = credited([Standardize("group", correction=1)], alone)
    np.testing.assert_allclose(got[:, 0], want[:, 0], rtol=1e-5)
    assert not got[:, 1:].any()


def test_equal_rewards_teach_nothing(drawn):
    outcome, turns, reward, states = drawn
    flat = np.zeros_like(outcome), turns, np.full_like(reward, 0.3), states
    assert not credited([GroupReturns(outcome=False)], flat).any()


def test_the_sum_of_a_group_s_standardised_rewards_is_zero(drawn):
    """A law: with gamma 0 each turn has its own standardised reward alone."""
    got = torch.tensor(credited([GroupReturns(0.0)], drawn)).view(-1, GROUP * K)
    torch.testing.assert_close(got.sum(1), torch.zeros(len(got), dtype=torch.float64))


def pure_by_hand(drawn, temperature: float, with_outcome: bool) -> np.ndarray:
    """PURE's rewards, its baseline per step, and the outcome's leave-one-out baseline."""
    outcome, turns, reward, _ = drawn
    found = np.zeros((N, K))
    for first in range(0, N, GROUP):
        members, worst = range(first, first + GROUP), dict[int, dict[int, float]]()
        for i in members:
            own = {k: reward[i, k] for k in range(turns[i]) if not np.isnan(reward[i, k])}
            total = sum(np.exp(-r / temperature) for r in own.values())
            worst[i] = {k: np.exp(-r / temperature) / total * r for k, r in own.items()}
        for i in members:
            per_step = [sum(worst[j].values()) / len(worst[j])
                        for j in members if j != i and worst[j]]  # fmt: skip
            for k in range(turns[i]):
                later = [r - np.mean(per_step) for at, r in worst[i].items() if at >= k]
                others = np.mean([outcome[j] for j in members if j != i])
                found[i, k] = sum(later) + with_outcome * (outcome[i] - others)
    return found


@pytest.mark.parametrize("temperature", [0.1, 1.0])
@pytest.mark.parametrize("outcome", [True, False])
def test_min_form_credit_is_pure_s(drawn, temperature, outcome):
    got = credited([MinReturns(temperature, outcome)], drawn)
    np.testing.assert_allclose(got, pure_by_hand(drawn, temperature, outcome), atol=1e-6)
    assert np.abs(got).max() > 0.5


@pytest.mark.parametrize(("temperature", "value"), [(0.1, 0.202), (1.0, 0.619)])
def test_the_sum_of_min_form_rewards_is_near_the_worst_step(temperature, value):
    """The published example of four steps; the rest of the group has no rewards."""
    reward = np.full((N, K), np.nan)
    reward[0] = 0.9, 0.9, 0.2, 0.9
    reward[1, 0] = 0.0  # a baseline of zero
    drawn = np.zeros(N), np.full(N, K), reward, np.zeros((N, K), dtype=int)
    got = credited([MinReturns(temperature, outcome=False)], drawn)
    assert got[0, 0] == pytest.approx(value, abs=1e-3)
