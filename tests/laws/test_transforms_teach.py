"""Credit that is 0 whatever the scores, told from credit that is 0 for some of them."""

import pytest

from flowrl.credit.advantages import Clip, Estimator, Standardize
from flowrl.credit.success import BestGap, BetaNormalize, MaxRL, PassAtK
from flowrl.credit.values import Transform
from flowrl.laws.transforms import can_teach
from flowrl.recipes import RECIPES
from tests.support.frozen import Nothing

BY_DATA: list[Transform] = [  # most are 0 for some groups whose scores differ
    PassAtK(4), PassAtK(4, form="analytic"), BestGap(), BestGap(scaled=False), MaxRL(),
    BetaNormalize(), Clip(1e-6),
]  # fmt: skip


@pytest.mark.parametrize("transform", BY_DATA, ids=repr)
def test_a_transform_that_is_zero_for_some_scores_teaches_by_others(transform: Transform) -> None:
    assert can_teach(Estimator((transform,)), 5, ["reward"])


@pytest.mark.parametrize("chain", [(Nothing(),), (Standardize(), Nothing()), (Nothing(), Clip(1))])
def test_one_that_is_zero_for_all_scores_does_not(chain: tuple[Transform, ...]) -> None:
    assert not can_teach(Estimator(chain), 5, ["reward", "another"])


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "joint"])
def test_every_recipe_can_teach(name: str) -> None:
    algorithm = RECIPES[name]()
    if not algorithm.text:
        names = ("reward", *(() if name != "gardo" else ("aesthetic", "distance")))
        assert can_teach(algorithm.advantage, algorithm.group, names)
