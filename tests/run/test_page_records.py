"""Records for a run's page: the tree's numbers, an interruption, and a page that cannot be made."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

from flowrl.pages.records import RECORDS_FOLDER, read_evaluations, read_trees
from flowrl.run.evaluate.evaluate import Trial, evaluate_held_out
from flowrl.run.show import page_records
from flowrl.run.start import resume, start
from flowrl.settings.read import run_from, run_of
from tests.support.runs import lines, opened, tree

BRANCH = {"name": "branch_grpo", "steps": 4, "at": [0, 2], "eta": 0.7, "clip": 0.2}


def settings(pipeline, folder, iterations):
    return run_from(tree(pipeline, folder, BRANCH, iterations=iterations), "test")


def records(folder):
    """Text of all records but the starts, which a resume adds to."""
    files = sorted((folder / RECORDS_FOLDER).glob("*.json"))
    return {path.name: path.read_text() for path in files}


def test_images_that_a_row_names_are_copied(tmp_path):
    Image.new("RGB", (40, 20), (200, 0, 0)).save(tmp_path / "a.png")
    a, piece = str(tmp_path / "a.png"), f"{tmp_path}/a.png#xywh=0,0,8,8"
    row = {"image": piece, "other": a, "images": [a, a, None], "video": a, "mask": "gone.png"}
    found = page_records.images_of_row(row, 20)
    assert [(each.name, each.width, each.height) for each in found] == [
        ("image", 8, 8),
        ("images", 20, 10),
    ]
    assert all(each.media.startswith("data:image/png;base64,") for each in found)


def test_best_and_worst_are_those_of_all_samples():
    """Each prompt's first, unscored ones never; nothing without images."""
    scores = torch.tensor([3.0, 4.0, torch.nan, 0.0, 9.0, 1.0], dtype=torch.float64)
    places = page_records.ShownPlaces.of(scores, per_prompt=2, most=3)
    assert places == page_records.ShownPlaces([0, 2, 4], [4, 1, 3, 0, 5], [3, 5, 0, 1, 4])
    assert places.every == {0, 1, 2, 3, 4, 5}
    assert page_records.ShownPlaces.of(scores, 2, most=0).every == set()


def test_each_process_copies_its_own_samples(pipeline, tmp_path):
    """Shares of two and of seven processes, of which some have none, make the records of one."""
    session = opened(tree(pipeline, tmp_path, BRANCH, iterations=1), tmp_path)
    result = evaluate_held_out(session.learner, session.held_out, session.judges)
    e, parallel = session.run.evaluate, session.parallel
    trial = Trial.of(session.held_out, e.samples, e.per_prompt, 2, e.seed)
    places = set(range(len(result.samples.prompts)))
    whole = page_records.own_samples(parallel, result, trial, places)
    assert [(place, each.place) for place, each in whole.items()] == [(i, i) for i in places]
    scores = [each.scores["brightness"] for each in whole.values()]
    assert scores == pytest.approx(result.columns["brightness"].tolist(), abs=1e-5)
    for processes in (2, 7):
        found = {}
        for rank in range(processes):
            one = replace(parallel, rank=rank, processes=processes)
            mine, _ = one.share(len(trial.rows))
            rows = [i for i in places if i // trial.group in mine]
            own = replace(
                result.scores, values=result.scores.values[rows], scored=result.scores.scored[rows]
            )
            part = replace(result, samples=result.samples.take(rows), scores=own)
            found |= page_records.own_samples(one, part, trial, places)
        assert found == whole


@pytest.mark.slow
def test_the_records_of_a_tree_and_of_a_resumed_run(pipeline, tmp_path, capsys):
    whole = tmp_path / "whole"
    start(settings(pipeline, tmp_path, 3), "tiny", whole)
    assert (whole / "report.html").is_file() and "not updated" not in capsys.readouterr().err
    assert [each.iteration for each in read_evaluations(whole)] == [0, 2, 3]
    drawn = read_trees(whole)
    assert [each.iteration for each in drawn] == [1, 2, 3]
    for each in drawn:
        leaves = torch.tensor(each.totals, dtype=torch.float64)
        assert [len(level.values) for level in each.levels] == [2, 2, 4, 4]
        for level in each.levels:
            for node, value in enumerate(level.values):
                behind = leaves[torch.tensor(level.node) == node]
                assert value == pytest.approx(float(behind.mean()), abs=1e-5)
        spread = [level for level in each.levels if level.trained]
        assert spread and all(
            sum(level.advantages) == pytest.approx(0, abs=1e-4) for level in spread
        )
        scores = [leaf.scores["brightness"] for leaf in each.leaves]
        assert scores == pytest.approx(each.totals, abs=1e-5)
    last = read_evaluations(whole)[-1]
    mean = sum(last.scores["brightness"]) / len(last.scores["brightness"])
    assert mean == pytest.approx(lines(whole)[-1]["held_out/brightness"], abs=1e-5)
    assert last.best[0].scores["brightness"] == max(last.scores["brightness"])

    broken = tmp_path / "broken"
    start(settings(pipeline, tmp_path, 2), "tiny", broken)
    late = json.loads((broken / RECORDS_FOLDER / "tree-000002.json").read_text()) | {"iteration": 9}
    (broken / RECORDS_FOLDER / "tree-000009.json").write_text(
        json.dumps(late)
    )  # of a killed process
    run = run_of(broken)
    run = run.model_copy(update={"train": run.train.model_copy(update={"iterations": 3})})
    resume(run, broken)
    assert records(broken) == records(whole)


@pytest.mark.slow
def test_a_page_that_cannot_be_made_does_not_end_the_run(pipeline, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page_records, "write_report", full)
    monkeypatch.setattr(page_records, "write_record", full)
    result = start(settings(pipeline, tmp_path, 1), "tiny", tmp_path / "run")
    assert result.done and not (tmp_path / "run" / "report.html").exists()
    warnings = [line for line in capsys.readouterr().err.splitlines() if "page" in line]
    assert warnings and {*warnings} == {"warning: the run's page was not updated: the disk is full"}
