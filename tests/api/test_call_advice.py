"""Advice of calls from Python and of parts in a program: each message is raised, and the call that
does what it says ends as it should.

`tests/settings/test_advice_works.py` finds all messages that advise something and counts these.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from peft import LoraConfig

import flowrl
from flowrl.api.adapters import lora_section
from flowrl.credit.comparisons import TwoLevel
from flowrl.credit.intermediate import needed_intermediate
from flowrl.credit.selection import MaxVariance
from flowrl.credit.trees import GlobalLocal
from flowrl.credit.values import node_values
from flowrl.losses.averages import check_policies
from flowrl.losses.preference import GroupPreference
from flowrl.losses.ratio import Surrogate
from flowrl.losses.weights import HighEntropy
from flowrl.recipes import RECIPES
from samplers import Ode
from tests.credit.test_refused_calls import RAGGED, WAY, context, credit, scores
from tests.run.test_own_runs import tree
from tests.support.advice import fixed_parts


class CallAdvice(NamedTuple):
    """A call that a message refuses, and the call that follows its advice; both are given an empty
    folder. `says`: a part of the message's source, which identifies it."""

    says: str
    call: Callable[[Path], Any]
    follow: Callable[[Path], Any]


def points(folder: Path, **more: Any) -> flowrl.Run:
    return flowrl.Run(settings=tree(folder, iterations=1), **more)


def begun(folder: Path) -> Path:
    points(folder).train(folder=folder / "run")
    return folder / "run"


def opened(folder: Path) -> flowrl.Run:
    return flowrl.Run.open(begun(folder), trust=True)


CALLS = [
    CallAdvice(
        'wait belongs to resume="auto": leave it out',
        lambda folder: points(folder).train(folder=folder / "run", wait=True),
        lambda folder: points(folder).train(folder=folder / "run"),
    ),
    CallAdvice(
        "a resumed run already has its {}: leave {} out",
        lambda folder: flowrl.train(resume=begun(folder), lora=4, trust=True),
        lambda folder: flowrl.train(resume=begun(folder), iterations=2, trust=True),
    ),
    CallAdvice(
        "a resumed run already has a folder: leave `folder` out",
        lambda folder: flowrl.train(resume=begun(folder), folder=folder / "other", trust=True),
        lambda folder: flowrl.train(resume=begun(folder), iterations=2, trust=True),
    ),
    CallAdvice(
        "lora: peft.LoraConfig({}): a run's adapters have a rank (r), lora_alpha, target_modules "
        "and use_dora: leave {} out",
        lambda folder: lora_section(LoraConfig(r=4, lora_dropout=0.1)),
        lambda folder: lora_section(LoraConfig(r=4)),
    ),
    CallAdvice(
        "a run has its own call arguments (model.call): leave call out",
        lambda folder: flowrl.sample(opened(folder), "a point", plan=Ode(), call={"x": 1}),
        lambda folder: flowrl.sample(opened(folder), "a point", plan=Ode(), steps=2),
    ),
    CallAdvice(
        "an average called {} already exists: choose another name",
        lambda folder: check_policies(("slow", "slow"), "current", ()),
        lambda folder: check_policies(("slow", "slower"), "current", ()),
    ),
    CallAdvice(
        "credit: {} does not use blend: leave it out",
        lambda folder: RECIPES["flow_grpo"](credit="gdpo", blend=0.5),
        lambda folder: RECIPES["flow_grpo"](credit="gdpo"),
    ),
    CallAdvice(
        "MaxVariance cannot keep {} samples of a group of {}: lower keep",
        lambda folder: MaxVariance(5)(credit(), context()),
        lambda folder: MaxVariance(4)(credit(), context()),
    ),
    CallAdvice(
        "TwoLevel needs uniform trees: use GlobalLocal for other trees",
        lambda folder: TwoLevel()(credit(columns=2), context((4, 4), nodes=RAGGED)),
        lambda folder: GlobalLocal()(credit(columns=2), context((4, 4), nodes=RAGGED)),
    ),
    CallAdvice(
        "path fusion needs uniform trees: use fusion='mean' or 'max'",
        lambda folder: node_values(scores(), context((4, 4), nodes=RAGGED), "path"),
        lambda folder: [
            node_values(scores(), context((4, 4), nodes=RAGGED), "mean"),
            node_values(scores(), context((4, 4), nodes=RAGGED), "max"),
        ],
    ),
    CallAdvice(
        "this credit reads intermediate scores, which the samples do not have: use a plan with "
        "intermediate rewards",
        lambda folder: needed_intermediate(context()),
        lambda folder: needed_intermediate(
            context(scores=scores(intermediate=WAY))
        ),
    ),
    CallAdvice(
        "a loss can select tokens by entropy only once: remove the other selections",
        lambda folder: Surrogate(0.2, 0.2, weights=(HighEntropy(share=0.5),) * 2),
        lambda folder: Surrogate(0.2, 0.2, weights=(HighEntropy(share=0.5),)),
    ),
    CallAdvice(
        "clip_kl removes the gradient of a divergence where a clip acts: set both",
        lambda folder: GroupPreference(4, clip_kl=True),
        lambda folder: GroupPreference(4, clip_kl=True, clip_at=0.1, kl=0.1),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CALLS, ids=[case.says[:40] for case in CALLS])
def test_following_the_advice_of_a_call(case: CallAdvice, tmp_path: Path) -> None:
    for name in ("call", "follow"):
        (tmp_path / name).mkdir()
    with pytest.raises((flowrl.UserError, ValueError)) as error:
        case.call(tmp_path / "call")
    said = " ".join(str(error.value).split())
    for part in fixed_parts(case.says):
        assert " ".join(part.split()) in said
    case.follow(tmp_path / "follow")
