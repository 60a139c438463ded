"""Which choices each part refuses: a refusal that is dropped, or that another hides, shows here.

Each of SITUATIONS differs from plain images or plain texts in one choice, so that a part that has
several reasons to refuse is asked about each alone. refusals.json has for each part that can refuse
those that it does. After a refusal was changed on purpose, write the table again:

    python -m tests.laws.test_refusals
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flowrl.credit.advantages import Estimator, Standardize
from flowrl.credit.choices import AnyPlanner, Choices, Refusing, plans_of
from flowrl.credit.comparisons import BestWorst, Exponential
from flowrl.credit.success import PassAtK
from flowrl.credit.trackers import NoTracker, PromptValues
from flowrl.likelihoods.matching import Matching
from flowrl.likelihoods.pathwise import Pathwise
from flowrl.likelihoods.shortcuts import Kept, Shortcuts
from flowrl.likelihoods.token import Token
from flowrl.likelihoods.transition import Transition
from flowrl.losses.base import Anchor
from flowrl.losses.ratio import Surrogate
from flowrl.losses.reward import RewardGradient
from flowrl.losses.weights import HighEntropy, Mismatch
from samplers import Chain, FeynmanKac, FlowSDE, Looking, Ode, Particled, Route, Tree
from samplers.completions import Completions, Segments
from samplers.routes.tails import LastSteps, TwoLeaps
from tests.laws.test_laws import LEVELS
from tests.laws.test_ranges import parts

TABLE = Path(__file__).with_name("refusals.json")
KERNEL = FlowSDE()


@dataclass(frozen=True)
class Chosen:
    """An algorithm's choices."""

    plan: AnyPlanner
    likelihood: object
    transforms: tuple[Any, ...] = (Standardize(),)
    behaviour: str = "slow"
    tracker: Callable[[], Any] = PromptValues

    @cached_property
    def plans(self) -> tuple[Any, ...]:
        return plans_of(self.plan, LEVELS, 0, 0)


IMAGES = Chosen(Chain(KERNEL, 4), Transition(means=True))
TEXTS = Chosen(Completions(4), Token(entropy=True))
STEERED = Particled(Ode(4), KERNEL, 4, FeynmanKac((1,)), 0, 8)
SITUATIONS: dict[str, Choices] = {
    "images": IMAGES,
    "images that branch": replace(IMAGES, plan=Tree(KERNEL, (0, 2))),
    "one image": replace(IMAGES, plan=Chain(KERNEL, 1)),
    "images from the same noise": replace(IMAGES, plan=Chain(KERNEL, 4, shared_noise=True)),
    "images without noise": replace(IMAGES, plan=Ode(4)),
    "images with looks": replace(IMAGES, plan=Looking(Chain(KERNEL, 4))),
    "images with looks that branch": replace(IMAGES, plan=Looking(Tree(KERNEL, (0, 2)))),
    "steered images": replace(IMAGES, plan=STEERED),
    "steps without means": replace(IMAGES, likelihood=Transition()),
    "errors of velocities": replace(IMAGES, plan=Ode(4), likelihood=Matching()),
    "gradients of rewards": replace(IMAGES, plan=LastSteps(4), likelihood=Pathwise(Kept())),
    "gradients through leaps": replace(
        IMAGES, plan=TwoLeaps(4), likelihood=Pathwise(Shortcuts("lagrange"))
    ),
    "images sampled by the weights that learn": replace(
        IMAGES, plan=Ode(4), likelihood=Matching(), behaviour="current"
    ),
    "images without a tracker": replace(IMAGES, tracker=NoTracker),
    "one image without a tracker": replace(IMAGES, plan=Chain(KERNEL, 1), tracker=NoTracker),
    "images by best and worst": replace(IMAGES, transforms=(BestWorst(),)),
    "images by exponential weights": replace(IMAGES, transforms=(Exponential(),)),
    "texts": TEXTS,
    "texts that branch": replace(TEXTS, plan=Segments(2, 2, (2,))),
    "one text": replace(TEXTS, plan=Completions(1)),
    "texts without entropies": replace(TEXTS, likelihood=Token()),
    "ratios of whole texts": replace(TEXTS, likelihood=Token(ratio="product", entropy=True)),
    "texts without a tracker": replace(TEXTS, tracker=NoTracker),
    "texts by best and worst": replace(TEXTS, transforms=(BestWorst(),)),
}

VARIANTS: dict[str, Refusing] = {  # settings with reasons of their own to refuse
    "Anchor of a ratio, RewardGradient": RewardGradient(anchors=(Anchor(0.1, corrected=True),)),
    "Estimator": Estimator((Standardize(),)),
    "Estimator by paths": Estimator((Standardize(),), fusion="path"),
    "Matching by parts, in pairs": Matching(parts=("video",), paired=True),
    "Matching by parts, two together": Matching(parts=("video",), together=2),
    "Matching in pairs and together": Matching(paired=True, together=2),
    "Matching, three together": Matching(together=3),
    "Matching, two together": Matching(together=2),
    "PassAtK of three": PassAtK(3),
    "PassAtK of four, one left out": PassAtK(4, form="leave_one_out"),
    "Shortcuts of order 2": Shortcuts("lagrange", order=2),
    "Shortcuts with a bridge": Shortcuts("lagrange", alpha=0.5),
    "Shortcuts with tau": Shortcuts("lagrange", tau=1.0),
    "Shortcuts of Euler with tau": Shortcuts("euler", tau=1.0),
    "Surrogate of entropies": Surrogate(0.2, 0.2, entropy=0.1),
    "Surrogate of the most uncertain": Surrogate(0.2, 0.2, weights=(HighEntropy(share=0.2),)),
    "Surrogate of another engine's texts": Surrogate(0.2, 0.2, weights=(Mismatch(),)),
}


def refusals() -> dict[str, list[str]]:
    """The situations that each part refuses, by class or variant."""
    plain = {kind: part for kind, part in sorted(parts().items()) if isinstance(part, Refusing)}
    return {
        kind: [name for name, choices in SITUATIONS.items() if part.refuses(choices) is not None]
        for kind, part in (plain | VARIANTS).items()
        if not isinstance(part, Route)  # a route refuses its layers
    }


def test_every_part_refuses_the_choices_of_the_table():
    assert refusals() == json.loads(TABLE.read_text())


if __name__ == "__main__":
    lines = (f"  {json.dumps(kind)}: {json.dumps(found)}" for kind, found in refusals().items())
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
