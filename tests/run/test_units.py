"""Draws that are cut into units of calls: the same samples to rounding, and the same cut always."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flowrl.errors import UserError
from flowrl.estimate.workers import traffic
from flowrl.iteration.features.units import cuttable
from flowrl.iteration.units import StoredSamples
from flowrl.run.watch.start_check import check_shares
from flowrl.run.workers.transport import (
    all_states,
    all_tensors,
    as_bytes,
    bytes_of,
    distinct_states,
    mapped,
    of_bytes,
)
from flowrl.session.progress import Progress
from flowrl.settings.read import check_plan, run_from
from flowrl.settings.sections.workers import ReplicaSettings, WorkerSettings
from flowrl.table import EMPTY
from rewards import Samples
from samplers.completions import TextRollout
from tests.support import runs, text_runs, tiny_lm
from tests.support.iterations import iterate, sample_unit, sample_units, unit_of

RECIPES: dict[str, dict[str, Any]] = {
    "chain": {"name": "flow_grpo", "steps": 3, "group": 2},
    "window": {"name": "flow_grpo_fast", "steps": 4, "group": 2, "window": 2},
    "tree": {"name": "branch_grpo", "steps": 3, "at": [0, 1]},
    "matching": {"name": "nft", "steps": 3, "group": 2, "levels_per_sample": 2},
}
WHOLE = unit_of(3, (10, 11, 12, 13, 14), (0, 1, 2, 3, 0))


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


@pytest.mark.quick_cases("tree")
@pytest.mark.parametrize("kind", RECIPES)
def test_units_sample_what_shared_calls_sample(kind, pipeline, tmp_path):
    opened = session(pipeline, tmp_path, RECIPES[kind], unit=2)
    whole = replace(opened, learner=replace(opened.learner, run=session_run(opened, None)))
    cut, shared = (sample_units(each, WHOLE) for each in (opened, whole))
    assert cut.evaluations == shared.evaluations and cut.scored == shared.scored
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


@pytest.mark.slow
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
    whole = unit_of(0, (0, 1, 2), (0, 1, 2))
    mine, want = (sample_units(each, whole) for each in (cut, plain))
    assert [each.media for each in mine.samples] == [each.media for each in want.samples]
    assert mine.rollouts[0].prompt.tolist() == want.rollouts[0].prompt.tolist()
    same(mine.rollouts[0].logp, want.rollouts[0].logp)


REFUSED = [
    ({"gpus": 1}, {}, "workers.gpus: it needs workers"),
    ({"lag": 1}, {"recipe": {"name": "draft", "steps": 3}}, "workers.lag: reward gradients"),
    ({"address": "auto"}, {}, "workers.address: it needs workers"),
    ({"lag": 1, "sampling": 1}, {"recipe": {"name": "draft", "steps": 3}}, "reward gradients"),
    ({"rewards": {"ocr": {}}}, {}, "no reward has the label 'ocr'; choose one of brightness"),
    ({"sampling": 1}, {"rewards": [{"name": "python:mine", "label": "mine"}]}, "a Python object"),
    ({"rewards": {"brightness": {}}}, {"recipe": {"name": "draft", "steps": 3}}, "gradient"),
]  # fmt: skip


@pytest.mark.parametrize(("workers", "others", "sentence"), REFUSED)
def test_what_cannot_be_right_is_refused(
    workers, others, sentence, pipeline, tmp_path, monkeypatch
):
    monkeypatch.setattr("flowrl.settings.checks.machine.find_spec", lambda name: name)
    settings = runs.tree(pipeline, tmp_path, RECIPES["chain"]) | others | {"workers": workers}
    with pytest.raises(UserError, match=sentence):
        check_plan(run_from(settings, "test"))


def test_without_ray_workers_are_refused_with_the_way_out(pipeline, tmp_path, monkeypatch):
    monkeypatch.setattr("flowrl.settings.checks.machine.find_spec", lambda name: None)
    settings = runs.tree(pipeline, tmp_path, RECIPES["chain"]) | {"workers": {"sampling": 2}}
    with pytest.raises(UserError, match=r"pip install 'flowrl\[ray\]'"):
        check_plan(run_from(settings, "test"))


def test_samples_move_with_all_that_they_are_made_of(pipeline, tmp_path):
    opened = session(pipeline, tmp_path, RECIPES["tree"])
    made = sample_units(opened, unit_of(0, (0,), (0,)))
    double = mapped(made, lambda tensor: tensor.clone())
    pairs = list(zip(all_tensors(made), all_tensors(double), strict=True))
    assert len(pairs) > 10 and all(a is not b and a.equal(b) for a, b in pairs)
    assert type(double) is type(made) and double.rollouts[0].plan == made.rollouts[0].plan


@pytest.mark.quick_cases("tree")
@pytest.mark.parametrize("kind", RECIPES)
def test_distinct_states_are_sent_and_all_come_back(kind, pipeline, tmp_path):
    """Counted by hand: the parents of the first trained step, the children of each, and x0."""
    opened = session(pipeline, tmp_path, RECIPES[kind])
    made = sample_units(opened, unit_of(0, (0, 1), (0, 1)))
    (rollout,) = made.rollouts
    sent = distinct_states(rollout)
    for whole, back in zip(all_tensors(rollout), all_tensors(all_states(sent)), strict=True):
        assert whole.equal(back)
    states = sum(len(edge.x) + len(edge.x_next) for edge in sent.edges)
    first = {"chain": 2, "window": 2, "tree": 1, "matching": 0}[kind]
    children = {"chain": 2 + 2, "window": 2 + 2, "tree": 2 + 4, "matching": 0}[kind]
    assert states == 2 * (first + children)


def test_states_that_do_not_continue_the_step_before_are_sent_too(pipeline, tmp_path):
    """As where replay replaced a sample, or a step between them is not trained."""
    opened = session(pipeline, tmp_path, RECIPES["chain"])
    (rollout,) = sample_units(opened, unit_of(0, (0, 1), (0, 1))).rollouts
    first, second = rollout.edges
    other = replace(rollout, edges=(first, replace(second, x=second.x + 1)))
    for whole, back in zip(
        all_tensors(other), all_tensors(all_states(distinct_states(other))), strict=True
    ):
        assert whole.equal(back)


def test_a_tensor_travels_without_the_memory_that_it_looks_at():
    whole = torch.arange(12.0).view(3, 4).bfloat16()
    for tensor in (whole[1], whole[:, 2], whole[:0], whole.T, torch.tensor(True), whole[0, 0]):
        numbers, *more = as_bytes(tensor)
        assert numbers.nbytes == tensor.numel() * tensor.element_size()
        back = of_bytes((numbers, *more))
        assert back.equal(tensor) and back.dtype == tensor.dtype and back.shape == tensor.shape


def test_stored_samples_bring_only_what_is_taken():
    asked: list[int] = []

    def part(number: int) -> tuple[int, Any]:
        def bring() -> Samples:
            asked.append(number)
            media = torch.full((2, 3, 1, 1), float(number))
            return Samples(media, ["p"] * 2, torch.zeros(2, dtype=torch.long))

        return 2, bring

    group = torch.arange(6) // 2
    stored = StoredSamples((part(0), part(1), part(2)), list("aabbcc"), group, (), "image")
    taken = stored.take([4, 1])
    assert taken.media[:, 0, 0, 0].tolist() == [2.0, 0.0] and asked == [0, 2]
    assert taken.prompts == ["c", "a"] and taken.group.tolist() == [2, 0]


def test_each_training_process_needs_a_worker(pipeline, tmp_path):
    tree = runs.tree(pipeline, tmp_path, RECIPES["chain"])
    check_shares(run_from({**tree, "workers": {"unit": 1}}, "run.yaml"), 4)  # no workers
    run = run_from({**tree, "workers": {"sampling": 2}}, "run.yaml")
    check_shares(run, 2)
    with pytest.raises(UserError, match="2 for 3 training processes"):
        check_shares(run, 3)


def bare(sampled, scores):
    """What a worker sends of a unit besides its media."""
    rollouts = tuple(map(distinct_states, sampled.unit.rollouts))
    unit = replace(sampled.unit, samples=(), rollouts=rollouts, table=EMPTY)
    return unit, replace(scores, samples=())


@pytest.mark.quick_cases("tree")
@pytest.mark.parametrize("kind", RECIPES)
def test_plan_counts_the_bytes_that_a_unit_has(kind, pipeline, tmp_path):
    opened = session(pipeline, tmp_path, RECIPES[kind], sampling=1)
    found = traffic(opened.run)
    sent = [bare(*sample_unit(opened, unit_of(0, (i,), (0,)))) for i in range(5)]
    assert found is not None and not found.bound
    assert found.samples == sum(map(bytes_of, sent))
    own = opened.learner.policies.copies({opened.algorithm.behaviour})
    assert found.weights == bytes_of(own)


def test_plan_bounds_the_bytes_of_texts(tmp_path):
    """They end where they end: at most as many tokens as the plan has."""
    model = tiny_lm.write(tmp_path / "model")
    opened = text_runs.session(model, tmp_path, text_runs.GRPO)
    found = traffic(opened.run)
    sampled, scores = sample_unit(opened, unit_of(0, (0, 1, 2), (0, 1, 2)))
    (texts,) = sampled.unit.rollouts
    assert isinstance(texts, TextRollout) and found is not None and found.bound
    sent, longest = bytes_of(bare(sampled, scores)), opened.algorithm.steps
    missing = len(texts.ids) * (longest - texts.ids.shape[1]) * (8 + 4)
    assert sent + missing == found.samples
    own = opened.learner.policies.copies({opened.algorithm.behaviour})
    assert found.weights == bytes_of(own)


@pytest.mark.parametrize("kind", ["chain", "text"])
def test_plan_counts_the_media_that_replicas_score(kind, pipeline, tmp_path):
    if kind == "text":
        model = tiny_lm.write(tmp_path / "model")
        opened, draws = text_runs.session(model, tmp_path, text_runs.GRPO), (0, 1, 2)
    else:
        opened, draws = session(pipeline, tmp_path, RECIPES[kind]), (0, 1, 2, 3, 4)
    (label,) = opened.rewards
    workers = WorkerSettings(rewards={label: ReplicaSettings()})
    found = traffic(opened.run.model_copy(update={"workers": workers}))
    made = sample_units(opened, unit_of(0, draws, (0,) * len(draws)))
    assert found is not None and found.media == bytes_of(made.samples)


def test_several_plans_are_sampled_without_rewards_where_replicas_score_them(pipeline, tmp_path):
    forks = {"name": "temp_flow", "steps": 3, "roots": 1, "branch": 2}
    opened = replace(session(pipeline, tmp_path, forks), rewards={})
    (_, made), known = sample_unit(opened, unit_of(0, (0,), (0,)))
    assert len(known.plans) == len(made.samples) > 1
    for samples, scores in zip(made.samples, known.plans, strict=True):
        assert scores.values.shape == (len(samples.prompts), 0) and scores.names == ()
