"""Recipes and mixtures of parts that cannot train: one table of the room, with a row for each
sentence. Numbers out of range are in test_refused_ranges.py."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from flowrl.algorithm import Algorithm, Average, Decay
from flowrl.contrib.fdfo import Churn
from flowrl.contrib.g2rpo import Granular
from flowrl.credit.advantages import Estimator, ScaleSteps, Standardize
from flowrl.credit.comparisons import Exponential
from flowrl.credit.uncompared import Uncompared
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.noise_levels import Discrete, PermutedGrid
from flowrl.likelihoods.pathwise import Pathwise
from flowrl.likelihoods.shortcuts import Kept, Shortcuts
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.transition import Transition
from flowrl.losses.base import Anchor
from flowrl.losses.preference import Preference
from flowrl.losses.ratio import Surrogate
from flowrl.losses.regression import NFT, Weighted
from flowrl.losses.reward import RewardGradient
from flowrl.losses.weights import HighEntropy, OffPolicyMask
from flowrl.recipes import RECIPES
from flowrl.settings import recipe_kind
from samplers import Chain, FlowSDE, Gaussian, Ode, Plan, Prune, Tree, Window, steps_of
from samplers.completions import Completions
from samplers.routes.tails import LastSteps, SomeSteps, TwoLeaps
from tests.support.refusals import refusal_in, refusals_in

LEVELS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)


@dataclass(frozen=True)
class Still:
    """A plan whose samples are all the same."""

    group: int

    def __call__(self, sigmas, iteration: int, seed: int) -> tuple[Plan, ...]:
        return (Plan(steps_of(sigmas), roots=self.group, shared_noise=True),)


@dataclass(frozen=True)
class OwnSDE:
    """A kernel that flowrl does not have."""

    def __call__(self, x, v, sigma, sigma_next) -> Gaussian:
        return Gaussian(x - v, torch.full_like(sigma, 0.1))

    def bound(self, sigmas) -> "OwnSDE":
        return self


def dgpo(**parts: Any) -> Algorithm:
    return replace(RECIPES["dgpo"](group=12), **parts)


def through(plan: Any, starts: Any) -> Algorithm:
    return Algorithm(8, plan, Estimator((Uncompared(),)), Pathwise(starts), RewardGradient())


def texts(loss: Any, likelihood: Any = Token()) -> Algorithm:
    return Algorithm(4, Completions(4), GROUP, likelihood, loss)


def written(**settings: Any) -> Algorithm:
    """A mixture as a run's file writes it."""
    return recipe_kind("text")(name="text", **settings).algorithm()


GROUP = Estimator((Standardize(),))
CHAIN, ODE, CLIP = Chain(FlowSDE(), 4), Ode(4), Surrogate(0.2, 0.2)
TRAILING = Average("trailing", Decay(slope=0.001, most=0.5))
PATHS = Estimator((Standardize(),), "path")
UNCERTAIN = Surrogate(0.2, 0.2, weights=(HighEntropy(0.2),))
TREES_OF = {"name": "segments", "roots": 4, "branch": 2, "at": [256]}
PAIRS = {"advantage": "best_worst", "loss": {"name": "preference", "beta": 0.1}}
SLOW = Surrogate(0.2, 0.2, anchors=(Anchor(1.0, "slow"),))

REFUSED = [
    # recipes
    (lambda: RECIPES["flow_grpo"](credit="gdpo", blend=0.5), "gdpo does not use blend"),
    (lambda: RECIPES["nft"](blend=2.0), "blend must be between 0 and 1"),
    (lambda: RECIPES["opd"](weight=0.0), "weight must be above 0, not 0.0"),
    (lambda: RECIPES["opd"](task=-1.0), "task must be at least 0"),
    (lambda: RECIPES["flow_dppo"](kernel=OwnSDE()), "OwnSDE has no published divergence"),
    (lambda: RECIPES["dance_grpo"](best_over="batch"), "set train_share below 1"),
    (lambda: RECIPES["mix_grpo"](schedule="frozen", roll_back=True), "frozen never moves"),
    (lambda: RECIPES["branch_grpo"](siblings=3.0), r"must be in \[0, 1\], not 3"),
    (lambda: RECIPES["rwr"](rate=0.0), "no reward is read: raise it"),
    (lambda: RECIPES["text_reinforce"](kl=0.0, kl_in="reward"), "kl_in: reward needs kl above 0"),
    (lambda: RECIPES["srpo"](levels=(0.9, 0.3)), "0 < low < high < 1"),
    (lambda: RECIPES["draft"](steps=4, last=5), "does not fit 4 steps"),
    (lambda: RECIPES["dgpo"](steps=5, levels_per_sample=4), "set levels_per_sample: 3 or lower"),
    (lambda: RECIPES["text_grpo"](group=1), "a group of at least 2"),
    # contributed ones
    (
        lambda: RECIPES["dense_grpo"](noise=(0.5,) * 9, kernel=FlowSDE(0.7)),
        "noise is a table of Flow-SDE's noise",
    ),
    (lambda: RECIPES["euphonium"](outcome=0.0), "outcome is 0.0, which has no effect"),
    (lambda: RECIPES["euphonium"](steps=10), "guidance has no effect"),
    (lambda: RECIPES["pro_grpo"](keep=()), "`keep` must list the sizes"),
    (lambda: RECIPES["draft_lv"](draws=0), "draws must be at least 1, not 0"),
    (lambda: replace(RECIPES["fdfo"](), plan=Chain(Churn(), 2)), "with shared_noise=True"),
    (lambda: Churn(-0.1), "the share of noise to renew, must be at least 0"),
    (lambda: Granular(FlowSDE(), 4, at=(5,))(LEVELS, 0, 0), "fork at must be between 0 and 3"),
    (lambda: Granular(FlowSDE(), 4, (0,), grids=(0,))(LEVELS, 0, 0), "grid must be at least 1"),
    # mixtures
    (lambda: Algorithm(0, ODE, GROUP, Matching(), CLIP), "must be at least 1"),
    (
        lambda: Algorithm(4, ODE, GROUP, Transition(), CLIP),
        "deterministic: use Chain, Window, Fork or Tree",
    ),
    (lambda: Algorithm(4, CHAIN, GROUP, Transition(), NFT()), "use the Matching likelihood"),
    (lambda: Algorithm(4, ODE, GROUP, Matching(), NFT()), "add an average, such as Average"),
    (
        lambda: Algorithm(4, ODE, GROUP, Matching(paired=True), Preference(1.0)),
        "BestWorst as the last transform",
    ),
    (lambda: Algorithm(4, ODE, GROUP, Matching(), Preference(1.0)), "paired=True in Matching"),
    (lambda: Algorithm(4, ODE, GROUP, Matching(paired=True), CLIP), "takes each row alone"),
    (
        lambda: Algorithm(4, ODE, GROUP, Matching(), Weighted()),
        "make Exponential the last transform",
    ),
    (lambda: Algorithm(4, Ode(1), GROUP, Matching(), CLIP), "a group of at least 2"),
    (
        lambda: Algorithm(4, CHAIN, GROUP, Transition(), SLOW),
        "policy 'slow', but there are only old, ref, teacher: add an Average",
    ),
    (
        lambda: Algorithm(4, ODE, GROUP, Matching(), NFT(), (TRAILING,), "trialing"),
        "did you mean 'trailing'",
    ),
    (
        lambda: Algorithm(4, ODE, GROUP, Matching(), CLIP, (Average("ref", Decay()),)),
        "choose another name",
    ),
    (
        lambda: Algorithm(4, ODE, GROUP, Matching(), CLIP, (TRAILING, TRAILING)),
        "choose another name",
    ),
    (
        lambda: Algorithm(4, Window(FlowSDE(), 4, size=9), GROUP, Transition(), CLIP),
        "does not fit 4 steps",
    ),
    (
        lambda: Algorithm(4, Tree(FlowSDE(), (0, 7)), GROUP, Transition(), CLIP),
        "does not fit 4 steps",
    ),
    (
        lambda: Algorithm(4, ODE, GROUP, Matching(9, PermutedGrid()), CLIP),
        "raise steps$",
    ),
    (
        lambda: Algorithm(4, ODE, GROUP, Matching(4, Discrete()), CLIP),
        "raise steps$",
    ),
    (
        lambda: Algorithm(4, ODE, Estimator((ScaleSteps("std"),)), Matching(), CLIP),
        "needs a plan with a kernel",
    ),
    (
        lambda: Algorithm(6, Tree(FlowSDE(), (0, 2), prune=Prune((2,))), PATHS, Transition(), CLIP),
        "train on all",
    ),
    (lambda: Algorithm(4, Still(4), GROUP, Matching(), CLIP), "set shared_noise to False"),
    (lambda: dgpo(likelihood=Matching()), "compares 12 rows"),
    (lambda: dgpo(plan=Ode(20)), "set together to the group's size"),
    (lambda: dgpo(plan=Ode(24)), r"the plan has groups of \[24\]: make them equal"),
    (
        lambda: replace(RECIPES["flow_grpo"](), loss=RECIPES["flow_dppo"]().loss),
        "use Transition",
    ),
    (lambda: Algorithm(4, ODE, GROUP, Pathwise(Kept()), CLIP), "use both or neither"),
    (lambda: through(ODE, Kept()), "use the plan LastSteps or OneOfSteps"),
    (lambda: through(SomeSteps(1), Shortcuts("lagrange")), "plan TwoLeaps with the same order"),
    (lambda: through(TwoLeaps(1, 2), Shortcuts("lagrange", 3)), "leaps of order 3 need the plan"),
    (lambda: through(SomeSteps(1), Shortcuts("euler", alpha=0.5)), "has not: set split"),
    (lambda: through(SomeSteps(1), Shortcuts("euler", tau=0.1)), "or use the rule lagrange"),
    (lambda: through(SomeSteps(1, 9), Shortcuts("euler")), "does not fit 8 steps"),
    # mixtures of texts
    (
        lambda: replace(RECIPES["text_stream"](), tracker=replace(RECIPES["text_grpo"]()).tracker),
        "a group of at least 2",
    ),
    (lambda: texts(Surrogate(0.2, 0.2, entropy=0.1)), r"Token\(entropy=True\)"),
    (lambda: texts(UNCERTAIN), r"Token\(entropy=True\)"),
    (
        lambda: Algorithm(
            4, CHAIN, GROUP, Transition(), Surrogate(0.2, 0.2, weights=(OffPolicyMask(0.2),))
        ),
        "leave them out",
    ),
    (lambda: written(plan=TREES_OF, group=8), "group has no effect, since"),
    (lambda: written(loss={"name": "vespo", "low": 0.1}), "vespo: 'low' is not known"),
    (lambda: written(loss="gmpo", likelihood={"ratio": "sequence"}), "set ratio to token"),
    (lambda: written(plan=TREES_OF, advantage="max_rl"), "compares whole completions"),
    (lambda: written(advantage="global_local"), "independent completions do not have"),
    (lambda: written(advantage="baseline"), "set tracker: prompt_values"),
    (lambda: written(loss={"name": "preference", "beta": 0.1}), "use paired=True in Token"),
    (lambda: written(**PAIRS, likelihood={"paired": True}, kl=0.1), "kl has no effect, since"),
    (
        lambda: written(
            advantage=["drop_flat", "baseline"], plan={"group": 1}, tracker="prompt_values"
        ),
        "every group of one",
    ),
    (
        lambda: written(advantage=[{"name": "penalize", "weight": 0.0}, "leave_one_out"]),
        "must be above 0",
    ),
    (
        lambda: written(
            plan=TREES_OF, advantage=[{"name": "penalize", "weight": 0.1}, "leave_one_out"]
        ),
        "completions of a tree",
    ),
    (lambda: written(group=1), "a group of at least 2"),
]
ALLOWED = [  # beside a row that is refused
    lambda: Algorithm(
        4, Chain(FlowSDE(), 4, shared_noise=True), Estimator((Exponential(),)), Matching(), CLIP
    ),
    lambda: through(LastSteps(1), Shortcuts("euler")),
    lambda: texts(UNCERTAIN, Token(entropy=True)),
    lambda: RECIPES["text_stream"](),
]


def test_what_cannot_train_is_refused_by_a_sentence_each() -> None:
    reached = {refusal_in("flowrl", make, sentence) for make, sentence in REFUSED}
    assert refusals_in("flowrl/recipes").keys() <= reached


@pytest.mark.parametrize("make", ALLOWED)
def test_what_differs_by_the_reason_alone_is_taken(make) -> None:
    assert make().group


def test_a_preset_refuses_what_it_does_not_have():
    with pytest.raises(TypeError, match="loss"):
        RECIPES["text_grpo"](loss="cispo")
