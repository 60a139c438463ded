"""What contributed parts refuse: one table of the folder, with a row for each sentence."""

from typing import Any

import pytest
import torch

from flowrl.contrib.dense_grpo import dense_grpo
from flowrl.contrib.euphonium import euphonium
from flowrl.contrib.fdfo import Churn, Quadratic
from flowrl.contrib.g2rpo import Granular
from flowrl.contrib.potential_tree import Potential
from flowrl.contrib.pro_grpo import pro_grpo
from flowrl.contrib.text_gppo import GPPO
from flowrl.contrib.text_riskpo import RiskPO, ScoreQuantiles
from flowrl.contrib.vgpo import AbsoluteValue, Discounted
from samplers import FlowSDE, Plan
from tests.support.refusals import refusal_in, refusals_in

ROOM = "flowrl/contrib"
LEVELS = (1.0, 0.9, 0.7, 0.4, 0.0)


def forked(**settings: Any) -> tuple[Plan, ...]:
    """The plans of four steps, of which the last is not noisy."""
    return Granular(FlowSDE(0.5), **settings)(LEVELS, 0, 0)


def bundled(draws: int, scored: bool = True) -> torch.Tensor:
    values = torch.arange(2.0 * draws).view(draws, 2, 1)
    return RiskPO(bundle=2).rule(values, torch.full(values.shape, scored))


REFUSED = [
    (lambda: dense_grpo(noise=(0.5,), kernel=FlowSDE(0.5)), "with another kernel: give only one"),
    (lambda: euphonium(outcome=0.5), "outcome is 0.5, which has no effect without process"),
    (lambda: Churn(-0.1), "share of noise to renew, must be at least 0"),
    (lambda: Quadratic(bound=0.0), "bound of a quadratic penalty must be above 0, not 0"),
    (lambda: forked(at=(0, 3)), r"steps to fork at must be between 0 and 2, got \(0, 3\)"),
    (lambda: forked(at=(-1,)), "steps to fork at must be between 0 and 2"),
    (lambda: forked(at=()), "steps to fork at must be between 0 and 2"),
    (lambda: forked(at=(0,), grids=(1, 0)), r"each grid must be at least 1 .*, got \(1, 0\)"),
    (lambda: forked(at=(0,), grids=()), "each grid must be at least 1"),
    (lambda: Potential(-1.0), "weight of intermediate rewards must be at least 0"),
    (lambda: pro_grpo(keep=(), at=()), "`keep` must list the sizes to which the group shrinks"),
    (lambda: GPPO(0.0, 0.3), r"low must be in \(0, 1\], high above 0"),
    (lambda: GPPO(1.1, 0.3), r"low must be in \(0, 1\], high above 0"),
    (lambda: GPPO(0.2, 0.0), r"low must be in \(0, 1\], high above 0"),
    (
        lambda: RiskPO(low=0.0),
        r"RiskPO's levels must satisfy 0 < low < high < 1, not \(0\.0, 0\.8\)",
    ),
    (lambda: ScoreQuantiles(low=0.8), "ScoreQuantiles's levels must satisfy 0 < low < high < 1"),
    (lambda: RiskPO(high=1.0), "levels must satisfy 0 < low < high < 1"),
    (lambda: bundled(3), "bundles 2 draws, but 3 is not a multiple of that: change prompts"),
    (lambda: bundled(2, scored=False), "one of its samples is unscored"),
    (lambda: Discounted(-0.1), r"the discount must be in \[0, 1\], not -0\.1"),
    (lambda: Discounted(1.1), r"the discount must be in \[0, 1\], not 1\.1"),
    (lambda: AbsoluteValue(bounds=(2.0, 0.5)), "must be at least 0, the lower one first"),
    (lambda: AbsoluteValue(bounds=(-0.1, 0.5)), "must be at least 0, the lower one first"),
    (lambda: AbsoluteValue(share=1.1), r"share of the steps must be in \[0, 1\], not 1\.1"),
    (lambda: AbsoluteValue(kappa=-0.1), r"kappa must be at least 0, not -0\.1"),
]

AT_THEIR_BOUNDS = [
    lambda: Churn(0.0),
    lambda: forked(at=(0, 2), grids=(1,)),
    lambda: Potential(0.0),
    lambda: GPPO(1.0, 0.3),
    lambda: bundled(2),
    lambda: Discounted(0.0),
    lambda: Discounted(1.0),
    lambda: AbsoluteValue(bounds=(0.0, 0.0), share=0.0, kappa=0.0),
    lambda: AbsoluteValue(share=1.0),
    lambda: euphonium(outcome=0.5, process=0.5),
]


def test_what_contributed_parts_refuse_has_a_sentence_each() -> None:
    reached = {refusal_in(ROOM, make, sentence) for make, sentence in REFUSED}
    assert refusals_in(ROOM).keys() <= reached


@pytest.mark.parametrize("make", AT_THEIR_BOUNDS)
def test_settings_at_their_bounds_are_taken(make: Any) -> None:
    assert make() is not None
