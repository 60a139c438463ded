"""Numbers of an update and of an iteration, against sums and maxima by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.iteration.learning_check import (
    SHARES,
    ZEROS,
    LearningCheck,
    UpdateFacts,
    broken_loss,
    healthy_update,
)
from flowrl.iteration.score import joined_columns, mean_metrics, plan_scores
from flowrl.iteration.update import roles_of_trained_weights
from flowrl.losses.distillation import Distillation
from flowrl.losses.ratio import Surrogate
from flowrl.losses.reward import RewardGradient
from rewards import Scores

STILL = UpdateFacts(4, 4, 3, 2, {"a": (0.0, 0.0), "b": (1e-9, 2e-4), "c": (0.5, 1e-4)})


def test_a_module_without_a_gradient_is_not_reached():
    assert (STILL.reached, STILL.steepest, STILL.moved) == (["b", "c"], 0.5, 2e-4)
    nothing = UpdateFacts(1, 1, 0, 0, {})
    assert (nothing.reached, nothing.steepest, nothing.moved) == ([], 0.0, 0.0)
    learner: Any = SimpleNamespace(run=SimpleNamespace(model=SimpleNamespace(lora=None)))
    said = healthy_update(learner, STILL, {"lr": 1e-3})
    assert "2 of 4 rows have a gradient, which reaches 2 of 3 modules" in said
    assert said.endswith("none reaches a")


def test_facts_of_processes_are_summed_and_modules_take_the_largest():
    other = UpdateFacts(2, 1, 1, 1, {"a": (0.25, 1e-5), "b": (0.0, 0.0), "d": (0.0, 1e-6)})
    modules = {"a": (0.25, 1e-5), "b": (1e-9, 2e-4), "c": (0.5, 1e-4), "d": (0.0, 1e-6)}
    assert UpdateFacts.joined([STILL, other]) == UpdateFacts(6, 5, 4, 3, modules)


def broken(loss: Any, **metrics: float) -> str:
    learner: Any = SimpleNamespace(algorithm=SimpleNamespace(loss=loss))
    return broken_loss(learner, STILL, metrics)


def test_a_loss_without_a_gradient_is_explained_by_its_metrics_at_their_bounds():
    clips, unknown = Surrogate(0.2, 0.2), "the loss Surrogate does not depend on the policy"
    for name, reason in SHARES.items():
        assert (
            broken(clips, **{name: 1.0}) == f"none of 3 rows has a gradient: {name} is 1, {reason}"
        )
        assert unknown in broken(clips, **{name: 0.99})
    for name, reason in ZEROS.items():
        assert (
            broken(clips, **{name: 0.0}) == f"none of 3 rows has a gradient: {name} is 0, {reason}"
        )
        assert unknown in broken(clips, **{name: 0.01})
    assert "the clip range stops all of them" in broken(clips, clipped_low=0.25, clipped_high=0.75)
    assert unknown in broken(clips, clipped_low=0.25, clipped_high=0.5)
    teacher = Distillation()
    assert "the teacher's weights equal the student's" in broken(teacher, kl_teacher=0.0)
    assert "the loss Distillation does not" in broken(teacher, kl_teacher=0.1)
    assert unknown in broken(clips, kl_teacher=0.0)
    hinge, scores = RewardGradient(form="hinge", bound=0.5), {"through/score": 0.625}
    said = broken(hinge, **{"through/satisfied": 1.0}, **scores)
    assert "recipe.bound 0.5, and the samples score 0.625" in said
    assert "the loss RewardGradient" in broken(hinge, **{"through/satisfied": 0.75}, **scores)


def test_what_was_judged_is_watched_no_more():
    assert LearningCheck().watch() is not None and LearningCheck(done=True).watch() is None


def test_a_metric_is_the_mean_over_the_parts_that_have_it():
    assert mean_metrics([{"a": 1.0}, {"a": 3.0, "b": 5.0}]) == {"a": 2.0, "b": 5.0}


def test_totals_of_a_plan_are_those_of_everyone_and_columns_keep_the_order_of_rewards():
    columns = [
        Scores(torch.tensor([[x], [y]]), torch.ones(2, 1, dtype=torch.bool), (name,))
        for name, x, y in (("a", 1.0, 2.0), ("b", 3.0, 5.0))
    ]
    joined = joined_columns(columns, ("b", "a"))
    assert joined.names == ("b", "a")
    everyone = joined_columns([joined], ("a", "b"))
    scores = plan_scores(columns[0], everyone, torch.tensor([10.0, 1.0], dtype=torch.float64))
    assert scores.own is columns[0] and scores.totals.tolist() == [13.0, 25.0]


@pytest.mark.parametrize(
    ("roles", "sampled_by", "behaviour", "old", "shared"),
    [
        ({"current", "old"}, "current", "current", None, {"current", "old"}),
        ({"current", "old"}, "current", "current", 1, {"current"}),
        ({"current"}, "current", "current", None, {"current"}),
        ({"current", "old"}, "kept", "average", None, {"current", "old"}),
        ({"current", "old"}, "kept", "current", None, {"current"}),
        ({"current", "reference"}, "current", "current", None, {"current"}),
    ],
)
def test_roles_of_the_trained_weights_share_an_evaluation(
    roles, sampled_by, behaviour, old, shared
):
    loss = SimpleNamespace(roles=frozenset(roles))
    algorithm = SimpleNamespace(loss=loss, behaviour=behaviour)
    learner: Any = SimpleNamespace(algorithm=algorithm, old=sampled_by)
    chunk: Any = SimpleNamespace(old=old)
    found = roles_of_trained_weights(learner, chunk, frozenset({"average"}))
    assert found == shared
