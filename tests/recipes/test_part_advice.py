"""Advice about the parts of an algorithm: each message is raised as a user meets it, by a run's
settings where these can hold the part, and what it says is done."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.algorithm import Algorithm, Average, Decay
from flowrl.credit.advantages import Estimator, Standardize, Sum
from flowrl.credit.choices import plans_of
from flowrl.credit.comparisons import BestWorst
from flowrl.credit.proxies import ProxyGate
from flowrl.credit.turns import Penalize
from flowrl.credit.values import node_values
from flowrl.errors import UserError, feature_files
from flowrl.laws import check_loss
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.pathwise import Pathwise
from flowrl.likelihoods.shortcuts import Kept
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.transition import Likelihood, Transition
from flowrl.losses.base import Anchor, Objective, RatioLoss
from flowrl.losses.preference import CentredReward, Preference
from flowrl.losses.ratio import Surrogate
from flowrl.losses.reward import RewardGradient
from flowrl.recipes import RECIPES
from flowrl.run.evaluate.start_checks import check_levels
from flowrl.settings.read import check_plan, run_from
from samplers import Chain, FlowSDE, Ode, Plan, steps_of
from samplers.routes.tails import LastSteps
from tests.credit.test_refused_calls import LEVELS, Wrong, context, scores
from tests.laws.test_laws import settings_of
from tests.likelihoods.test_refused_calls import EVALUATION, ROWS
from tests.support import runs, text_runs
from tests.support.advice import advice

GROUP = Estimator((Standardize(),))
PAIRS = Estimator((BestWorst(),))
SLOW = (Average("slow", Decay(0.9)),)


def planned(folder: Path, **recipe: Any) -> Callable[[], None]:
    """Reads the settings of a run, with parts of a user's file, and plans its first iteration."""

    def plan() -> None:
        check_plan(run_from(settings_of(folder, recipe), "test"))

    return plan


def test_a_plan_that_leaves_its_nodes_to_plan_is_taken() -> None:
    advice(
        "{} returned a {} that says it has {} nodes and a group of {}, but its steps make {} "
        "nodes: leave nodes and group to samplers.Plan, which computes them from roots and steps",
        lambda: plans_of(lambda *_: (Wrong(steps_of(LEVELS), roots=4),), LEVELS, 0, 0),
        lambda: plans_of(lambda *_: (Plan(steps_of(LEVELS), roots=4),), LEVELS, 0, 0),
    )


def test_without_a_penalty_of_weight_0_the_recipe_is_taken(tmp_path: Path) -> None:
    def text(*more: Any) -> None:
        recipe = {"name": "text_grpo", "advantage": ["standardize", *more]}
        check_plan(run_from(text_runs.tree(tmp_path, tmp_path, recipe), "test"))

    advice(
        "the weight of a KL penalty in the reward must be above 0, not {}: leave the penalty out",
        lambda: text({"name": "penalize", "weight": 0}),
        text,
    )
    assert Penalize(0.1).weight == 0.1


def test_path_fusion_reads_the_density_of_a_trained_step() -> None:
    trained = {1: torch.zeros(4)}
    values = advice(
        "path fusion needs the log-densities of the branching step {}: train that step",
        lambda: node_values(scores(), context((2, 4)), "path"),
        lambda: node_values(scores(), replace(context((2, 4)), logp=trained), "path"),
    )
    assert values.mask.all()


def test_without_its_setting_a_feature_that_is_not_installed_is_not_asked_for() -> None:
    def needs(missing: str | None) -> str:
        with feature_files("flowrl.iteration.features", "novelty"):
            if missing is not None:
                raise ModuleNotFoundError(missing, name=missing)
        return "runs"

    missing = "flowrl.iteration.features.novelty"
    done = advice(
        "this run needs the feature {}, and this installation of flowrl lacks {}: install flowrl "
        "again, or leave out the setting that asks for it",
        lambda: needs(missing),
        lambda: needs(None),
    )
    assert done == "runs"


class Loss(RatioLoss):
    def policy(self, log_ratio, evaluations, rows):
        return -rows.advantage * log_ratio, {}


class Detached(Loss):
    def policy(self, log_ratio, evaluations, rows):
        return -rows.advantage * log_ratio.detach(), {}


def test_a_loss_that_is_not_detached_trains() -> None:
    advice(
        "{}: its values do not depend on the trained policy, so it trains nothing: use "
        "evaluations['new'], not detached",
        lambda: check_loss(Detached(), Transition()),
        lambda: check_loss(Loss(), Transition()),
    )


def test_a_loss_that_says_it_is_not_homogeneous_is_taken(tmp_path: Path) -> None:
    advice(
        "{} says homogeneous = True, but its values for {} A are not {} times those for A: set "
        "homogeneous = False; it then runs wherever advantages carry no weights of steps",
        planned(tmp_path, loss={"name": "P:Squares"}),
        planned(tmp_path, loss={"name": "P:Squares", "homogeneous": False}),
    )


def test_without_weights_of_steps_such_a_loss_is_taken(tmp_path: Path) -> None:
    def temp_flow(loss: Any, **more: Any) -> None:
        tree = settings_of(tmp_path, {"name": "temp_flow", "loss": loss, **more})
        del tree["recipe"]["group"]
        check_plan(run_from(tree, "test"))

    loss = {"name": "P:Squares", "homogeneous": False}
    advice(
        "{}: advantages carry the weights of steps, which reach the loss only if it is "
        "homogeneous in the advantage, and {} does not say so: leave {} out",
        lambda: temp_flow(loss),
        lambda: temp_flow(loss, advantage=["standardize"]),
    )


def test_a_transform_that_fills_says_so_and_stands_before_one_that_selects(tmp_path: Path) -> None:
    filling = {"name": "P:Fills", "keeps_mask": False}
    advice(
        "{} fills masked entries, which have no score or were left out of training: return "
        "Credit(value * credit.mask, credit.mask), or set keeps_mask = False",
        planned(tmp_path, advantage=["P:Fills"]),
        planned(tmp_path, advantage=[filling]),
    )
    followed = [[filling, "drop_flat"], ["drop_flat"], [filling]]
    for order in followed:
        advice(
            "{} fills masked entries (keeps_mask = False), but {} before it leaves entries out of "
            "training: put {} before {}, or leave one of them out",
            planned(tmp_path, advantage=["drop_flat", filling]),
            planned(tmp_path, advantage=order),
        )


@pytest.mark.parametrize(
    ("wanted", "follow"),
    [
        ({"name": "awm"}, {"levels_per_sample": 2}),
        ({"name": "awm"}, {"steps": 14}),
        ({"name": "awm", "times": "discrete_with_init"}, {"levels_per_sample": 3}),
        ({"name": "awm", "steps": 1}, {"steps": 14}),
        ({"name": "dgpo"}, {"levels_per_sample": 2}),
        ({"name": "dgpo", "levels": 0.1}, {"steps": 40}),
    ],
)
def test_as_many_levels_as_a_sample_has_are_drawn(
    wanted: dict[str, Any], follow: dict[str, Any], tmp_path: Path
) -> None:
    """The number that is advised is the largest that is taken."""
    with pytest.raises(UserError) as refused:
        planned(tmp_path, **wanted)()
    if "levels_per_sample" in follow:
        most = follow["levels_per_sample"]
        assert f"set levels_per_sample: {most} or lower" in str(refused.value)
        with pytest.raises(UserError, match="levels to draw"):
            planned(tmp_path, **wanted, levels_per_sample=most + 1)()
    advice(
        "has only {} levels to draw, not {} per sample: ",
        planned(tmp_path, **wanted),
        planned(tmp_path, **{**wanted, **follow}),
    )


def test_a_path_is_learned_by_the_gradient_of_its_reward() -> None:
    """The algorithm refuses other losses before; the likelihood says so too."""
    advice(
        "a path has no density and therefore no ratio: use the loss RewardGradient",
        lambda: Pathwise(Kept()).log_ratio(EVALUATION, EVALUATION, ROWS),
        lambda: Algorithm(4, LastSteps(4), Estimator((Sum(),)), Pathwise(Kept()), RewardGradient()),
    )


def test_samples_of_one_part_need_no_modalities(pipeline: Path, tmp_path: Path) -> None:
    parts = {"modalities": {"video": ["brightness"]}}

    def start(more: dict[str, Any]) -> None:
        check_levels(runs.session(pipeline, tmp_path, runs.FLOW_GRPO | more))

    advice(
        "recipe.modalities: this model's samples have one part alone: leave modalities out",
        lambda: start(parts),
        lambda: start({}),
    )


@pytest.mark.parametrize(
    ("algorithm", "follow"),
    [
        (
            lambda: Algorithm(4, Ode(4), GROUP, Matching(), CentredReward(4), SLOW),
            lambda: Algorithm(4, Ode(4), GROUP, Matching(together=4), CentredReward(4), SLOW),
        ),
        (
            lambda: Algorithm(4, Ode(2), GROUP, Matching(), CentredReward(2), SLOW),
            lambda: Algorithm(4, Ode(2), GROUP, Matching(together=2), CentredReward(2), SLOW),
        ),
        (
            lambda: Algorithm(4, Ode(4), PAIRS, Matching(), Preference(1.0)),
            lambda: Algorithm(4, Ode(4), PAIRS, Matching(paired=True), Preference(1.0)),
        ),
        (
            lambda: replace(RECIPES["text_dpo"](), likelihood=Token()),
            lambda: replace(RECIPES["text_dpo"](), likelihood=Token(paired=True)),
        ),
    ],
)
def test_a_likelihood_keeps_the_rows_together_that_a_loss_compares(
    algorithm: Callable[[], Algorithm], follow: Callable[[], Algorithm]
) -> None:
    advice(
        "the loss {} compares {} rows at a time, but {} keeps {} together: use", algorithm, follow
    )


def test_another_loss_does_not_need_rows_together(tmp_path: Path) -> None:
    alone = {"name": "group_preference", "group": 4, "kl": 0.0, "clip_at": None}
    advice(
        "the loss {} compares {} rows at a time, but {} keeps {} together: use {}, or choose "
        "another loss",
        planned(tmp_path, name="nft", loss=alone),
        planned(tmp_path, name="nft"),
    )


@pytest.mark.parametrize("together", [{"paired": True}, {"together": 4}])
def test_a_loss_of_single_rows_needs_none_together(together: dict[str, Any]) -> None:
    clip = Surrogate(0.2, 0.2)
    advice(
        "the loss {} takes each row alone, but {} keeps {} rows together: leave paired and "
        "together out of it, or choose a loss that compares rows",
        lambda: Algorithm(4, Ode(4), GROUP, Matching(**together), clip),
        lambda: Algorithm(4, Ode(4), GROUP, Matching(), clip),
    )


def test_pairs_are_of_best_and_worst_and_not_two_neighbours() -> None:
    """Both keep two rows together, and only one puts the better first."""
    with pytest.raises(UserError, match=r"the better first: use Matching\(paired=True\)"):
        Algorithm(4, Ode(2), PAIRS, Matching(together=2), Preference(1.0))
    Algorithm(4, Ode(2), PAIRS, Matching(paired=True), Preference(1.0))


class OfPairs(Surrogate):
    """A user's loss that compares the rows of a pair."""

    unit = 2


def test_a_column_of_samples_is_read_by_a_loss_of_single_rows() -> None:
    gated, plain = (Anchor(0.1, gated=True),), (Anchor(0.1),)
    chain, gate = Chain(FlowSDE(), 4), ProxyGate(("reward",))

    def algorithm(loss: Objective, likelihood: Likelihood, *before: ProxyGate) -> Algorithm:
        return Algorithm(4, chain, Estimator((*before, Standardize())), likelihood, loss)

    paired = Matching(paired=True)
    for follow in (
        lambda: algorithm(Surrogate(0.2, 0.2, anchors=gated), Matching(), gate),
        lambda: algorithm(OfPairs(0.2, 0.2, anchors=plain), paired),
    ):
        advice(
            "the loss reads {}, one value per sample, but its rows compare {} samples: choose "
            "another loss, or leave out what reads them",
            lambda: algorithm(OfPairs(0.2, 0.2, anchors=gated), paired, gate),
            follow,
        )


def test_another_form_of_the_kl_takes_a_kernel_that_is_not_affine(tmp_path: Path) -> None:
    clips = {"name": "P:Clips", "affine": False}
    for followed in ({"kl_form": "exact"}, {"kl": 0.0}, {"kernel": {"name": "flow_sde"}}):
        advice(
            "kl_form: velocity divides the distance of means by their slope in the velocity, but "
            "the kernel {} does not say that its mean is a x + b v: choose another kl_form, leave "
            "out the KL, or set `affine = True` in {} if it is",
            planned(tmp_path, kernel=clips, kl=0.1, kl_form="velocity"),
            planned(tmp_path, **{"kernel": clips, "kl": 0.1, "kl_form": "velocity", **followed}),
        )
