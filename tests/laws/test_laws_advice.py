"""What messages about broken laws advise is done, and the part then keeps its laws."""

from dataclasses import dataclass
from typing import Any

import torch

from flowrl.credit.values import Credit
from flowrl.laws import check_loss, check_planner, check_transform
from flowrl.likelihoods.transition import Transition
from flowrl.losses.base import RatioLoss
from samplers import Plan, steps_of
from tests.laws.test_laws import Planning, changes, draws, leaks
from tests.support.advice import advice


class Random(RatioLoss):
    """A loss that draws random numbers."""

    homogeneous = True

    def policy(self, log_ratio: Any, evaluations: Any, rows: Any) -> Any:
        return -rows.advantage * log_ratio * torch.rand(()), {}


class Plain(RatioLoss):
    """The same loss without them."""

    homogeneous = True

    def policy(self, log_ratio: Any, evaluations: Any, rows: Any) -> Any:
        return -rows.advantage * log_ratio, {}


def test_a_loss_draws_no_random_numbers() -> None:
    assert advice(
        "{} returns other values for the same rows: draw no random numbers",
        lambda: check_loss(Random(), Transition()),
        lambda: check_loss(Plain(), Transition()),
    )


@dataclass(frozen=True)
class Sorting:
    """A planner that sorts its list of levels, or a copy of it."""

    copied: bool

    def __call__(self, sigmas: Any, iteration: int, seed: int) -> Any:
        levels = list(sigmas) if self.copied else sigmas
        levels.sort()
        return (Plan(steps_of(levels[::-1]), roots=4),)


def test_plans_are_a_function_of_their_arguments_and_change_none() -> None:
    def seeded(sigmas: Any, iteration: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed + iteration)
        roots = int(torch.randint(2, 10**9, (), generator=generator))
        return (Plan(steps_of(sigmas), roots=roots),)

    advice(
        "{}: two calls return different plans, so a resumed run would not sample as an unbroken "
        "one; make the plans a function of the levels, the iteration and the seed",
        lambda: check_planner(Planning("random")),
        lambda: check_planner(seeded),
    )
    advice(
        "{}: it changes the list of levels that it is given; copy it first",
        lambda: check_planner(Sorting(copied=False)),
        lambda: check_planner(Sorting(copied=True)),
    )


def test_a_transform_returns_another_credit_that_is_the_same_each_time_and_0_where_masked() -> None:
    assert advice(
        "{} changes the credit that it is given: return another one",
        lambda: check_transform(changes),
        lambda: check_transform(lambda credit, context: Credit(credit.value * 2, credit.mask)),
    )

    def drawn_once(credit: Credit, context: Any) -> Credit:
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(credit.value.shape, generator=generator, dtype=credit.value.dtype)
        return Credit(noise * credit.mask, credit.mask)

    assert advice(
        "{} returns other credit for the same scores: all processes compute the same advantages, "
        "so draw no random numbers, and keep nothing between calls",
        lambda: check_transform(draws),
        lambda: check_transform(drawn_once),
    )
    assert advice(
        "{}: the value of a masked entry must be 0: return value * mask",
        lambda: check_transform(leaks),
        lambda: check_transform(
            lambda credit, context: Credit((credit.value + 1) * credit.mask, credit.mask)
        ),
    )
