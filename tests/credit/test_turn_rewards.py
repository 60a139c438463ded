"""Rewards of single turns: returns as the papers define them, in plain loops."""

import numpy as np
import pytest
import torch

from flowrl.contrib.text_rebn import WhitenTurns
from flowrl.credit.advantages import Estimator, Standardize
from flowrl.credit.turns import Discount, States, Turns
from flowrl.credit.values import SampleTurns
from rewards.types import IntermediateScores, Scores
from samplers import Columns
from tests.support.credit_context import context_of as context_with

N, K, GROUP, GAMMA = 12, 4, 4, 0.8


@pytest.fixture
def drawn():
    rng = np.random.default_rng(0)
    outcome = rng.integers(0, 3, N).astype(float)
    turns = rng.integers(1, K + 1, N)
    reward = rng.normal(size=(N, K))
    given = rng.random((N, K)) < 0.7  # turns that the environment rewarded
    states = rng.integers(0, 3, (N, K))
    return outcome, turns, np.where(given, reward, np.nan), states


def credited(transforms, drawn):
    outcome, turns, reward, states = drawn
    exists = torch.arange(K) < torch.tensor(turns)[:, None]
    given = torch.tensor(reward).masked_fill(~exists, torch.nan)[..., None]
    way = IntermediateScores(given.nan_to_num(0.0), ~given.isnan(), torch.ones(1))
    known = torch.ones(N, 1, dtype=torch.bool)
    scores = Scores(torch.tensor(outcome)[:, None], known, ("outcome",), way)
    ones = (1.0,) * K
    columns = Columns((GROUP,) * K, (True,) * K, std=ones, h=ones)
    context = context_with(columns, torch.ones(1), turns=SampleTurns(exists, torch.tensor(states)))
    advantage, mask = Estimator(tuple(transforms))(scores, context)
    assert torch.equal(mask, exists)
    return advantage.double().numpy()


def own(reward, i, k) -> float:
    return 0.0 if np.isnan(reward[i, k]) else float(reward[i, k])


def returns(drawn) -> np.ndarray:
    """R_t = r_t + gamma R_{t+1}, where the last turn's reward includes the outcome."""
    outcome, turns, reward, _ = drawn
    found = np.full((N, K), np.nan)
    for i in range(N):
        rest = 0.0
        for k in reversed(range(turns[i])):
            now = own(reward, i, k) + (outcome[i] if k == turns[i] - 1 else 0.0)
            rest = now + GAMMA * rest
            found[i, k] = rest
    return found


def test_gem_s_returns_are_whitened_over_the_batch(drawn):
    wanted = returns(drawn)
    every = wanted[~np.isnan(wanted)]
    wanted = np.nan_to_num((wanted - every.mean()) / (every.std() + 1e-9))
    found = credited((Discount(GAMMA), WhitenTurns()), drawn)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_at_grpo_compares_a_turn_s_own_reward_with_that_of_the_same_turn(drawn):
    outcome, turns, reward, _ = drawn
    wanted = np.zeros((N, K))
    for start in range(0, N, GROUP):
        for k in range(K):
            rows = [i for i in range(start, start + GROUP) if turns[i] > k]
            values = [outcome[i] + own(reward, i, k) for i in rows]
            for i, value in zip(rows, values, strict=True):
                spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
                if spread > 0:
                    wanted[i, k] = (value - np.mean(values)) / (spread + 1e-4)
    found = credited((Turns(), Standardize("group", correction=1, eps=1e-4)), drawn)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_gigpo_adds_returns_among_equal_states_to_the_whole_trajectory_s(drawn):
    outcome, turns, reward, states = drawn
    total = [outcome[i] + sum(own(reward, i, k) for k in range(turns[i])) for i in range(N)]
    later, wanted = returns(drawn), np.zeros((N, K))
    for start in range(0, N, GROUP):
        group = range(start, start + GROUP)
        mean = np.mean([total[i] for i in group])
        for i in group:
            for k in range(turns[i]):
                same = [
                    later[j, m] for j in group for m in range(turns[j])
                    if states[j, m] == states[i, k]
                ]  # fmt: skip
                wanted[i, k] = total[i] - mean + 0.5 * (later[i, k] - np.mean(same))
    found = credited((States(0.5, GAMMA),), drawn)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_without_rewards_of_turns_returns_are_those_of_the_outcome(drawn):
    outcome, turns, _, states = drawn
    silent = outcome, turns, np.full((N, K), np.nan), states
    found = credited((Discount(GAMMA),), silent)
    later = np.array([[max(t - 1 - k, 0) for k in range(K)] for t in turns])
    exists = np.arange(K) < turns[:, None]
    np.testing.assert_allclose(found, exists * outcome[:, None] * GAMMA**later, atol=1e-6)
