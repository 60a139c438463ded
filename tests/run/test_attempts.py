"""pass@k and votes beside what they mean: every choice of k samples, counted."""

from itertools import combinations
from math import isnan

import pytest
import torch

from flowrl.run.evaluate.attempts import Attempts, majority_success, pass_at_k
from rewards import Samples, Scores, load, score_all


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_choices_with_a_success(samples: int) -> None:
    for successes in range(samples + 1):
        results = [True] * successes + [False] * (samples - successes)
        for k in range(1, samples + 1):
            choices = list(combinations(results, k))
            share = sum(any(choice) for choice in choices) / len(choices)
            assert pass_at_k(samples, successes, k) == pytest.approx(share, abs=1e-15)
    assert isnan(pass_at_k(samples, 0, samples + 1))


def test_a_majority_counts_equal_answers_and_shares_ties() -> None:
    assert majority_success(["7", "8", "7"], [True, False, True]) == 1.0
    assert majority_success(["8", "8", "7"], [False, False, True]) == 0.0
    assert majority_success(["7", "8"], [True, False]) == 0.5
    assert majority_success([None, None, "7"], [False, False, True]) == 1.0  # no vote without one
    assert majority_success([None], [False]) == 0.0


def texts(*said: str) -> Samples:
    meta = [{"answer": "1/2"}] * 3 + [{"answer": "4"}] * 3
    return Samples(list(said), ["a"] * 3 + ["b"] * 3, torch.tensor([0, 0, 0, 1, 1, 1]), meta)


@pytest.mark.parametrize("name", ["exact_answer", "math_answer"])
def test_columns_hold_the_value_of_each_prompt(name: str) -> None:
    reward = {"right": load(name, find="boxed")}
    boxes = (r"\boxed{0.5}", r"\boxed{3}", r"\boxed{1/2}", r"\boxed{4}", r"\boxed{5}", r"\boxed{5}")
    samples = texts(*boxes)
    made = Attempts((1, 2), majority=True).columns(reward, samples, score_all(reward, samples))
    assert made["pass@1/right"].tolist() == pytest.approx([2 / 3] * 3 + [1 / 3] * 3)
    assert made["pass@2/right"].tolist() == pytest.approx([1.0] * 3 + [2 / 3] * 3)
    assert made["majority/right"].tolist() == [1.0] * 3 + [0.0] * 3  # 0.5 and 1/2 vote together


def test_unscored_samples_are_no_attempts() -> None:
    scored = torch.tensor([[True], [False], [True], [False], [False], [True]])
    scores = Scores(torch.tensor([[1.0], [0.0], [0.0], [0.0], [0.0], [1.0]]), scored, ("own",))
    made = Attempts((2,)).columns({"own": load("exact_answer")}, texts(*"abcdef"), scores)
    column = made["pass@2/own"]
    assert column[:3].tolist() == [1.0] * 3 and column[3:].isnan().all()
