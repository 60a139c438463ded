"""Draws that are cut into units of calls: the same samples to rounding, and the same cut always."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl.errors import UserError
from flowrl.run.experience.units import cuttable, sample_units
from flowrl.run.start import check_workers
from flowrl.run.state.progress import Progress
from flowrl.run.state.units import SamplingUnit
from flowrl.run.train import iterate
from flowrl.run.workers.transport import all_tensors, mapped
from flowrl.settings.read import check_plan, run_from
from tests.support import runs, text_runs, tiny_lm

RECIPES: dict[str, dict[str, Any]] = {
    "chain": {"name": "flow_grpo", "steps": 3, "group": 2},
    "window": {"name": "flow_grpo_fast", "steps": 4, "group": 2, "window": 2},
    "tree": {"name": "branch_grpo", "steps": 3, "at": [0, 1]},
    "matching": {"name": "nft", "steps": 3, "group": 2, "levels_per_sample": 2},
}
WHOLE = SamplingUnit(3, (10, 11, 12, 13, 14), (0, 1, 2, 3, 0))


def session(pipeline, folder, recipe: dict[str, Any], **workers: Any):
    settings = runs.tree(pipeline, folder, recipe, lr=1e-2)
    settings["prompts"]["per_iteration"] = 5
    return runs.opened({**settings, "workers": workers}, folder)


def same(first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(first, second, atol=2e-5, rtol=2e-5)


def test_units_are_the_draws_in_order():
    units = WHOLE.cut(2)
    assert [unit.first for unit in units] == [0, 2, 4]
    assert [unit.ids for unit in units] == [(10, 11), (12, 13), (14,)]
    assert [unit.rows for unit in units] == [(0, 1), (2, 3), (0,)]


@pytest.mark.parametrize("kind", RECIPES)
def test_units_sample_what_shared_calls_sample(kind, pipeline, tmp_path):
    opened = session(pipeline, tmp_path, RECIPES[kind], unit=2)
    whole = replace(opened, learner=replace(opened.learner, run=session_run(opened, None)))
    (_, cut), (_, shared) = (sample_units(each, WHOLE, {}) for each in (opened, whole))
    assert cut.evaluations == shared.evaluations and cut.looked == shared.looked
    for mine, want in zip(cut.rollouts, shared.rollouts, strict=True):
        assert mine.draws == want.draws and mine.prompt.tolist() == want.prompt.tolist()
        same(mine.x0, want.x0)
        for edge, other in zip(mine.edges, want.edges, strict=True):
            assert edge.prompt.tolist() == other.prompt.tolist()
            same(edge.logp, other.logp)
    for samples, want in zip(cut.samples, shared.samples, strict=True):
        assert samples.group.tolist() == want.group.tolist() and samples.prompts == want.prompts
        same(samples.media, want.media)
    assert cut.statistics.means == pytest.approx(shared.statistics.means, abs=1e-5)


def session_run(opened, unit):
    workers = opened.run.workers.model_copy(update={"unit": unit})
    return opened.run.model_copy(update={"workers": workers})


def test_an_iteration_learns_the_same_to_rounding(pipeline, tmp_path):
    made = []
    for unit in (None, 1, 2):
        opened = session(pipeline, tmp_path, RECIPES["tree"], unit=unit)
        metrics = iterate(opened, Progress()).metrics
        made.append((metrics["reward"], metrics["grad_norm"]))
    assert made[1] == pytest.approx(made[0], rel=1e-3) and made[1] != made[0]
    assert made[2] == pytest.approx(made[0], rel=1e-3)


def test_texts_are_cut_too_and_trees_of_texts_are_one_unit(tmp_path):
    model = tiny_lm.write(tmp_path / "model")
    plain, tree = (text_runs.session(model, tmp_path, r) for r in (text_runs.GRPO, text_runs.TREE))
    assert cuttable(plain, 0) and not cuttable(tree, 0)
    cut = replace(plain, learner=replace(plain.learner, run=session_run(plain, 1)))
    whole = SamplingUnit(0, (0, 1, 2), (0, 1, 2))
    (_, mine), (_, want) = (sample_units(each, whole, {}) for each in (cut, plain))
    assert [each.media for each in mine.samples] == [each.media for each in want.samples]
    assert mine.rollouts[0].prompt.tolist() == want.rollouts[0].prompt.tolist()
    same(mine.rollouts[0].logp, want.rollouts[0].logp)


REFUSED = [
    ({"lag": 1}, {}, "workers.lag: no workers"),
    ({"lag": 1, "sampling": 1}, {"recipe": RECIPES["matching"]}, "weights that sampled"),
    ({"lag": 1, "sampling": 1}, {"budget": {"flat": "drop"}}, "a budget chooses"),
    ({"lag": 1, "sampling": 1}, {"train": {"recompute_old": True}}, "train.recompute_old"),
]


@pytest.mark.parametrize(("workers", "others", "sentence"), REFUSED)
def test_a_lag_that_would_learn_something_else_is_refused(
    workers, others, sentence, pipeline, tmp_path, monkeypatch
):
    monkeypatch.setattr("flowrl.settings.workers.find_spec", lambda name: name)
    settings = runs.tree(pipeline, tmp_path, RECIPES["chain"]) | others | {"workers": workers}
    with pytest.raises(UserError, match=sentence):
        check_plan(run_from(settings, "test"))


def test_without_ray_workers_are_refused_with_the_way_out(pipeline, tmp_path, monkeypatch):
    monkeypatch.setattr("flowrl.settings.workers.find_spec", lambda name: None)
    settings = runs.tree(pipeline, tmp_path, RECIPES["chain"]) | {"workers": {"sampling": 2}}
    with pytest.raises(UserError, match=r"pip install 'flowrl\[ray\]'"):
        check_plan(run_from(settings, "test"))


def test_samples_move_with_all_that_they_are_made_of(pipeline, tmp_path):
    opened = session(pipeline, tmp_path, RECIPES["tree"])
    _, made = sample_units(opened, SamplingUnit(0, (0,), (0,)), {})
    double = mapped(made, lambda tensor: tensor.clone())
    pairs = list(zip(all_tensors(made), all_tensors(double), strict=True))
    assert len(pairs) > 10 and all(a is not b and a.equal(b) for a, b in pairs)
    assert type(double) is type(made) and double.rollouts[0].plan == made.rollouts[0].plan


def test_workers_of_several_processes_or_of_python_rewards_are_refused(pipeline, tmp_path):
    tree = runs.tree(pipeline, tmp_path, RECIPES["chain"])
    here = run_from({**tree, "workers": {"unit": 1}}, "run.yaml")
    check_workers(here, 2)  # no workers
    run = run_from({**tree, "workers": {"sampling": 2}}, "run.yaml")
    check_workers(run, 1)
    with pytest.raises(UserError, match="a single training process"):
        check_workers(run, 2)
    live = {"name": "python:mine", "label": "mine"}
    run = run_from({**tree, "rewards": [live], "workers": {"sampling": 2}}, "run.yaml")
    with pytest.raises(UserError, match="reward mine is a Python object"):
        check_workers(run, 1)
