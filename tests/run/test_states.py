"""`train.states` in whole runs: half the memory, ratio 1, and the same bits from the CPU."""

import pytest
import torch

from flowrl.errors import UserError
from flowrl.estimate.memory import estimate
from flowrl.iteration import ratio_check
from flowrl.session.progress import Progress
from flowrl.settings.checks.machine import check_kind
from flowrl.settings.read import run_from
from tests.support import runs
from tests.support.iterations import collect, iterate


def stored(experience) -> int:
    names = ("x", "x_next", "x0", "noise")
    parts = [getattr(rows, name, None) for rows in experience.rows for name in names]
    found = {part.data_ptr(): part for part in parts if part is not None}
    return sum(part.numel() * part.element_size() for part in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [runs.FLOW_GRPO, pytest.param(runs.NFT, marks=pytest.mark.slow)], ids=["grpo", "nft"]
)
def test_half_precision_halves_states_and_the_ratio_is_held(pipeline, tmp_path, recipe):
    plain = runs.session(pipeline, tmp_path, recipe)
    half = runs.session(pipeline, tmp_path, recipe, states={"dtype": "bfloat16"})
    first, second = collect(plain, 0), collect(half, 0)
    assert stored(first) == 2 * stored(second) > 0
    floors = [
        ratio_check.noise_floor(kept.learner, each)
        for kept, each in ((plain, first), (half, second))
    ]
    assert floors == [None, None] or floors[1] <= 2 * floors[0] + 1e-7
    assert estimate(plain.run).parts["states"] == 2 * estimate(half.run).parts["states"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [runs.FLOW_GRPO, runs.NFT], ids=["grpo", "nft"])
def test_states_on_the_cpu_change_no_bit(pipeline, tmp_path, recipe):
    weights = []
    for states in ({}, {"device": "cpu"}):
        kept, progress = runs.session(pipeline, tmp_path, recipe, states=states), None
        progress = Progress()
        for _ in range(2):
            iterate(kept, progress)
        weights.append([p.detach().clone() for p in kept.learner.policies.parameters.values()])
    assert all(map(torch.equal, *weights))


def test_settings_that_make_no_sense_are_refused(pipeline, tmp_path):
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO, states={"dtype": "int8"})
    with pytest.raises(UserError, match=r"train.states.dtype.*bfloat16"):
        run_from(tree, "test")
    text = runs.tree(pipeline, tmp_path, {"name": "text_grpo"}, states={"device": "cpu"})
    text["model"] = {"language": str(tmp_path)}
    run = run_from(text, "test")
    with pytest.raises(UserError, match=r"train.states: the states of texts are tokens"):
        check_kind(run, run.algorithm())
    whole = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    whole["model"] |= {"offload_experts": True, "lora": None}
    with pytest.raises(UserError, match=r"offload_experts: all weights are trained"):
        run_from(whole, "test")


def test_plan_counts_what_rests(pipeline, tmp_path):
    tree = runs.tree(pipeline, tmp_path, runs.FLOW_GRPO)
    tree["model"]["device"] = "cuda"
    plain = estimate(run_from(tree, "test"))
    tree["train"]["states"] = {"device": "cpu"}
    away = estimate(run_from(tree, "test"))
    states = plain.parts["states"]
    assert plain.resting == plain.media and away.resting == plain.resting + states > plain.resting
    assert away.total == plain.total - states and "on the CPU" in str(away)
