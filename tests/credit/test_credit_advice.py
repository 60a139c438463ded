"""What messages of credit and of contributed recipes advise is done, and is accepted."""

from dataclasses import replace

import torch

from flowrl.contrib.dense_grpo import dense_grpo
from flowrl.credit.advantages import Standardize, Sum
from flowrl.credit.prompt_weights import PromptWeight
from flowrl.credit.proxies import ProxyGate
from flowrl.credit.success import BetaNormalize
from flowrl.credit.turns import Penalize, turn_rewards
from flowrl.credit.values import ReferenceRatios
from samplers import FlowSDE
from tests.credit.test_refused_calls import WAY, scores
from tests.credit.test_refused_calls import context as context_of
from tests.credit.test_refused_calls import credit as credit_of
from tests.credit.test_text_credit import credit, rewards
from tests.recipes.test_contributed_refusals import bundled
from tests.support.advice import advice


def test_every_prompt_has_a_weight_of_at_least_0() -> None:
    weight = PromptWeight("w")
    advice(
        "PromptWeight: row {} of prompts.train has {} in the column {}: give every prompt a number "
        "of at least 0",
        lambda: weight.check_rows([{"w": 0.5}, {"w": "heavy"}]),
        lambda: weight.check_rows([{"w": 0.5}, {"w": 0}]),
    )


def test_a_gate_names_the_reward_that_it_compares_with() -> None:
    advice(
        "ProxyGate needs a reward to compare with: name one in auxiliary",
        lambda: ProxyGate(()),
        lambda: ProxyGate(("again",)),
    )


def test_rewards_outside_0_to_1_are_rescaled() -> None:
    part = BetaNormalize()
    outside = credit_of(-0.5)
    result = advice(
        "BetaNormalize needs rewards in 0..1: rescale them",
        lambda: part(outside, context_of()),
        lambda: part(outside._replace(value=(outside.value + 1) / 2), context_of()),
    )
    assert result.mask.all()


def test_rewards_of_turns_come_behind_the_sum() -> None:
    two = credit_of(rewards=2)
    at = replace(context_of(scores=scores(intermediate=WAY)), weights=torch.ones(2))
    advice(
        "rewards of turns are added to the sum of a sample's rewards: put this transform behind "
        "sum",
        lambda: turn_rewards(two, at),
        lambda: turn_rewards(Sum()(two, at), at),
    )


def test_a_penalty_of_each_token_comes_after_what_compares_samples() -> None:
    apart = torch.tensor([[1.0, 0.5, 2.0, 4.0]] * 12, dtype=torch.float64)
    ratios = ReferenceRatios(apart, torch.zeros(12, 4, dtype=torch.int64))
    penalty = Penalize(0.1, each=True)
    value, _ = advice(
        "credit per token cannot be compared: put Penalize(each=True) after the transforms that "
        "compare samples",
        lambda: credit((penalty, Standardize()), rewards(), reference=ratios),
        lambda: credit((Standardize(), penalty), rewards(), reference=ratios),
    )
    assert value.shape == (12, 4)


def test_calibrated_noise_or_a_kernel_is_given() -> None:
    advice(
        "noise is a table of Flow-SDE's noise and cannot be combined with another kernel: give "
        "only one",
        lambda: dense_grpo(steps=2, noise=(0.5,), kernel=FlowSDE(0.5)),
        lambda: dense_grpo(steps=2, kernel=FlowSDE(0.5)),
    )
    assert dense_grpo(steps=2, noise=(0.5,)).steps == 2


def test_bundles_are_filled_by_another_number_of_prompts() -> None:
    advice(
        "RiskPO bundles {} draws, but {} is not a multiple of that: change prompts.per_iteration",
        lambda: bundled(3),
        lambda: bundled(4),
    )
