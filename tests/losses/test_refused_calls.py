"""Calls that losses refuse: one table of the room, with a row for each sentence."""

from dataclasses import dataclass

import torch

from flowrl.credit.advantages import ScaleSteps
from flowrl.credit.proxies import ProxyGate
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.pathwise import KnownNoise, Pathwise
from flowrl.likelihoods.rows import Evaluation
from flowrl.likelihoods.transition import Transition
from flowrl.losses.averages import check_policies
from flowrl.losses.base import (
    Anchor,
    check_affine,
    check_columns,
    check_units,
    check_weighted,
    entropies,
)
from flowrl.losses.off_policy import REC
from flowrl.losses.preference import CentredReward, Preference
from flowrl.losses.ratio import Surrogate
from flowrl.losses.regression import Weighted
from flowrl.losses.reward import RewardGradient, check_gradient
from samplers import Chain, FlowSDE, Plan, steps_of
from samplers.kernels import Gaussian
from tests.support.refusals import constructor_refusals, refusal_in, refusals_in

ROOM = "flowrl/losses"
CLIP, GATE = Surrogate(0.2, 0.2), ProxyGate(("reward",))
ANCHORED = Surrogate(0.2, 0.2, anchors=(Anchor(0.1),))
GATED = Surrogate(0.2, 0.2, anchors=(Anchor(0.1, gated=True),))
VELOCITY, PAIRED, PATHS = (
    Transition(kl_form="velocity"),
    Matching(paired=True),
    Pathwise(KnownNoise()),
)
LEVELS = (1.0, 0.5, 0.0)


@dataclass(frozen=True)
class Clipping(FlowSDE):
    """A kernel that does not say what its mean is."""

    affine = False

    def __call__(self, *state: torch.Tensor) -> Gaussian:
        mean, std = super().__call__(*state)
        return Gaussian(mean.clamp(-1, 1), std)


CLIPPED = (Plan(steps_of(LEVELS, noisy={0}, train={0}), Clipping(), 4),)
AFFINE = Chain(FlowSDE(), 4)(LEVELS, 0, 0)

REFUSED = [
    (lambda: check_policies(("slow", "slow"), "current", ()), "an average called 'slow' already"),
    (lambda: check_policies(("old",), "current", ()), "an average called 'old' already exists"),
    (
        lambda: check_policies(("slow",), "slowly", ()),
        "behaviour needs the policy 'slowly', but .* add an Average .* did you mean 'slow'",
    ),
    (lambda: check_policies(("slow",), "slow", ("fast",)), "the loss needs the policy 'fast', but"),
    (
        lambda: check_units(Preference(0.1), Matching()),
        r"use paired=True in Matching for the loss Preference, Matching\(together=2\) for",
    ),
    (
        lambda: check_units(Weighted(), PAIRED),
        "Weighted takes each row alone, but Matching keeps 2",
    ),
    (
        lambda: check_units(CentredReward(group=4), Matching()),
        "compares 4 rows at a time, but Matching keeps 1 together",
    ),
    (
        lambda: check_columns(GATED, Transition(), ()),
        "which need ProxyGate: add ProxyGate to the advantage",
    ),
    (
        lambda: check_columns(CLIP, Transition(), (GATE,)),
        "ProxyGate provides .*, which nothing in this algorithm reads: leave ProxyGate out",
    ),
    (
        lambda: check_columns(GATED, PAIRED, (GATE,)),
        "one value per sample, but its rows compare 2 samples: choose another loss",
    ),
    (
        lambda: check_weighted(REC(pull=0.1), (ScaleSteps("std"),)),
        "ScaleSteps: advantages carry the weights of steps.*REC does not say so",
    ),
    (
        lambda: check_affine(ANCHORED, VELOCITY, CLIPPED),
        "the kernel Clipping does not say that its mean is a x",
    ),
    (
        lambda: entropies(Evaluation(torch.zeros(1, 1), None)),
        r"reads entropies: set Token\(entropy=True\)",
    ),
    (lambda: check_gradient(RewardGradient(), Transition()), "use both or neither"),
    (lambda: check_gradient(CLIP, PATHS), "use both or neither"),
]


def test_calls_without_sense_are_refused_by_a_sentence_each() -> None:
    reached = {refusal_in(ROOM, make, sentence) for make, sentence in REFUSED}
    assert refusals_in(ROOM).keys() - constructor_refusals(ROOM).keys() <= reached


def test_what_fits_is_taken() -> None:
    check_policies(("slow",), "slow", ("old", "ref", "teacher", "slow"))
    check_units(Preference(0.1), PAIRED)
    check_units(CLIP, Transition())
    check_columns(GATED, Transition(), (GATE,))
    check_weighted(CLIP, (ScaleSteps("std"),))
    check_weighted(REC(pull=0.1), ())
    check_affine(CLIP, VELOCITY, CLIPPED)  # no KL is read
    check_affine(ANCHORED, Transition(kl_form="exact"), CLIPPED)
    check_affine(ANCHORED, VELOCITY, AFFINE)
    check_gradient(RewardGradient(), PATHS)
    check_gradient(CLIP, Transition())
