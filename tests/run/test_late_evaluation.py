"""Evaluations beside the next iteration: a run's lines, pages, best weights and checkpoints are
those of the run that evaluates in turn, also after an interruption in between."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from flowrl.errors import UserError
from flowrl.iteration.features.ahead import IterationsAhead
from flowrl.iteration.open import timed_units
from flowrl.iteration.units import StoredSamples
from flowrl.models.call_sizes import CallTooLarge
from flowrl.run import start, train
from flowrl.run.evaluate.evaluate import evaluate_held_out, scored_slice, slices_of_trial
from flowrl.run.evaluate.trial import ScoredTrial, StoredTrial
from flowrl.run.save import checkpoint
from flowrl.run.start import with_source
from flowrl.session.learner import evaluated
from flowrl.session.progress import Progress
from flowrl.settings.read import check_run, run_from
from rewards import Samples
from tests.support import runs
from tests.support.runs import flowrl, lines, write
from tests.support.warm import agree

CHAIN = {"name": "flow_grpo", "steps": 3, "group": 2, "clip": 0.2}
UNTIMED = ("seconds", "workers/")


class LateTrial:
    """Evaluates when it is waited for, with the weights that it was asked for."""

    def __init__(self, source: "LateSource", slices: list[Any], iteration: int) -> None:
        session = source.session
        self.source, self.slices, self.name = source, slices, evaluated(session.run)
        self.weights = session.learner.policies.copies({self.name})[self.name]
        self.waited, self.iteration = 0.5, iteration

    def parts(self) -> list[ScoredTrial]:
        session, source = self.source.session, self.source
        policies = session.learner.policies
        now = policies.copies({self.name})[self.name]
        source.late += [self.iteration] * any(not now[k].equal(self.weights[k]) for k in now)
        if source.full:
            raise source.full.pop()
        policies.replace_weights(self.name, self.weights)
        found = [scored_slice(session.learner, part, session.judges) for part in self.slices]
        policies.replace_weights(self.name, now)
        return [*map(_stored, self.slices, found)]


def _stored(part, each: ScoredTrial) -> ScoredTrial:
    """The same, with media that come when they are shown."""
    samples = each.drawn.samples
    assert isinstance(samples, Samples)
    group = torch.arange(len(part.rows)).repeat_interleave(part.group)
    kept = ((len(group), lambda: samples),), samples.prompts, group, samples.meta, samples.kind
    return each._replace(drawn=StoredTrial(StoredSamples(*kept), each.drawn.statistics))


class LateSource(IterationsAhead):
    """Samples in turn, and evaluates late."""

    late: ClassVar[list[int]] = []  # iterations evaluated after their weights changed
    full: ClassVar[list[Exception]] = []  # raised once each, in place of a result

    def ask(self, slices: list[Any], iteration: int) -> LateTrial:
        return LateTrial(self, slices, iteration)


@pytest.fixture
def late(monkeypatch) -> type[LateSource]:
    @contextmanager
    def with_late(session, cluster) -> Iterator[Any]:
        yield with_source(session, LateSource(session, timed_units(session)))

    monkeypatch.setattr(start, "with_workers", with_late)
    monkeypatch.setattr(LateSource, "late", [])
    monkeypatch.setattr(LateSource, "full", [])
    return LateSource


def settings(pipeline: Path, folder: Path, **evaluate: Any) -> dict[str, Any]:
    tree = runs.tree(pipeline, folder, CHAIN, iterations=5)
    tree["evaluate"] |= {"steps": 2, "samples": 4, "per_prompt": 1, **evaluate}
    return {**tree, "workers": {"unit": 1, "evaluate": True}}


def same_ends(folder: Path, wanted: Path) -> None:
    agree(folder, wanted, UNTIMED)
    parts = ("samples/*.*", "report/evaluation-*", "report/tree-*")
    shown = [p.relative_to(wanted) for part in parts for p in sorted(wanted.glob(part))]
    assert len(shown) > 3
    for name in shown:
        assert (folder / name).read_bytes() == (wanted / name).read_bytes(), name
    kept = sorted(p.relative_to(wanted) for p in wanted.glob("checkpoints/*/*.safetensors"))
    assert kept == sorted(p.relative_to(folder) for p in folder.glob("checkpoints/*/*.safetensors"))
    assert all((folder / name).read_bytes() == (wanted / name).read_bytes() for name in kept)
    states = [
        json.loads((run / "checkpoints" / "000005" / "state.json").read_text())
        for run in (folder, wanted)
    ]
    for state in states:
        state["progress"].pop("seconds")
        state.pop("ahead", None)
    assert states[0]["progress"] == states[1]["progress"]
    assert states[0]["alarms"] == states[1]["alarms"]


@pytest.fixture
def in_turn(pipeline, tmp_path, monkeypatch) -> Path:
    """The same run without workers, in the same slices; all weights that were the best stay."""
    monkeypatch.setattr(checkpoint, "drop_other_best", lambda *_: None)
    (tmp_path / "turn").mkdir()
    config = write(settings(pipeline, tmp_path, average=0.5), tmp_path)
    folder = tmp_path / "turn" / "run"
    assert flowrl("train", config, "--folder", folder) == 0
    assert all("seconds/waiting/evaluation" not in line for line in lines(folder))
    return folder


@pytest.mark.slow
def test_a_run_that_evaluates_late_is_the_run_that_evaluates_in_turn(in_turn, late, tmp_path):
    folder = tmp_path / "late" / "run"
    folder.parent.mkdir()
    assert flowrl("train", tmp_path / "tiny.yaml", "--folder", folder) == 0
    assert late.late == [2, 4]
    assert (folder / "best" / "000004").exists(), "found beside iteration 5"
    same_ends(folder, in_turn)
    waited = [line.get("seconds/waiting/evaluation") for line in lines(folder)]
    assert waited == [None, None, 0.5, None, 0.5, None]


@pytest.mark.slow
def test_an_interruption_with_an_evaluation_in_flight_repeats_its_iteration(
    in_turn, late, tmp_path, monkeypatch
):
    """The run ends in iteration 3, before the evaluation after iteration 2 is waited for."""
    folder = tmp_path / "broken" / "run"
    folder.parent.mkdir()
    iterate = train.iterate

    def ends(session, progress, *given):
        if progress.iteration == 2:
            raise SystemExit(9)
        return iterate(session, progress, *given)

    with monkeypatch.context() as broken:
        broken.setattr(train, "iterate", ends)
        assert flowrl("train", tmp_path / "tiny.yaml", "--folder", folder) == 9
    assert [line["iteration"] for line in lines(folder)] == [0, 1]
    assert max((folder / "checkpoints").iterdir()).name == "000001"
    assert flowrl("train", "--resume", folder) == 0
    same_ends(folder, in_turn)


@pytest.mark.slow
def test_a_run_that_an_evaluation_may_stop_waits_for_it(late, pipeline, tmp_path):
    tree = settings(pipeline, tmp_path)
    tree["train"] |= {"alarms": "stop", "iterations": 3}
    assert flowrl("train", write(tree, tmp_path), "--folder", tmp_path / "run") == 0
    assert late.late == []
    assert "held_out/brightness" in lines(tmp_path / "run")[2]


@pytest.mark.slow
def test_a_unit_that_is_too_large_is_asked_for_again(late, pipeline, tmp_path):
    tree = settings(pipeline, tmp_path)
    tree["train"] |= {"iterations": 3, "rows_per_call": 8}
    large = CallTooLarge(frozenset({"sampling"}), "no memory")
    late.full.append(large)
    assert flowrl("train", write(tree, tmp_path), "--folder", tmp_path / "run") == 0
    assert late.full == [] and "held_out/brightness" in lines(tmp_path / "run")[3]


@pytest.mark.slow
def test_units_of_an_evaluation_are_its_prompts_in_order(pipeline, tmp_path):
    tree = settings(pipeline, tmp_path, samples=8, per_prompt=2)
    cut = runs.opened(tree | {"workers": {"unit": 3, "evaluate": True}}, tmp_path)
    whole = runs.opened(tree | {"workers": {}}, tmp_path)
    assert cut.held_out is not None and whole.held_out is not None
    slices = slices_of_trial(cut.learner, cut.held_out)
    assert [part.rows for part in slices] == [(0, 1, 2), (3,)]
    assert len(slices_of_trial(whole.learner, whole.held_out)) == 1
    found, wanted = (
        evaluate_held_out(each.learner, each.held_out, each.judges) for each in (cut, whole)
    )
    assert found.samples.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found.samples.group.equal(wanted.samples.group)
    assert list(found.samples.prompts) == list(wanted.samples.prompts)
    assert found.columns.keys() == wanted.columns.keys()
    for name, column in wanted.columns.items():
        torch.testing.assert_close(found.columns[name], column, atol=1e-5, rtol=1e-5)


def test_counters_of_an_earlier_iteration_come_and_go():
    then = Progress(3, 6, 1, {"a": 2}, 4.0)
    now = Progress(4, 8, 0, {"a": 0}, 5.0)
    with now.as_of(then):
        assert (now.iteration, now.optimizer_steps, now.skipped_in_a_row) == (3, 6, 1)
        now.best, now.last = 0.5, {"x": 1.0}
    assert now == Progress(4, 8, 0, {"a": 0}, 5.0, best=0.5, last={"x": 1.0})


def test_evaluations_need_prompts(pipeline, tmp_path):
    tree = settings(pipeline, tmp_path)
    del tree["prompts"]["held_out"]
    with pytest.raises(UserError, match=r"workers\.evaluate: the run has no held-out prompts"):
        check_run(run_from(tree, "test"))
