"""`flowrl runs`: the state of each folder, from what is in it."""

import fcntl
import json
import os

import pytest

from flowrl.api.around import list_runs
from flowrl.cli.runs import RunLine, print_runs, text_table
from flowrl.errors import UserError
from flowrl.pages.run_folder import RunFolder
from flowrl.settings.read import open_folder

SETTINGS = "recipe: {name: flow_grpo}\ntrain: {iterations: 4}\n"
BASE = {"iteration": 0, "held_out/shapes": 0.5, "held_out_std/shapes": 0.1}
BETTER = {"iteration": 2, "held_out/shapes": 0.75, "alarms": 2}
WORSE = {"iteration": 4, "held_out/shapes": 0.25}


def folder_of(tmp_path, name, *lines, exported=False):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "run.yaml").write_text(SETTINGS)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if exported:
        (folder / "adapter").mkdir()
    return folder


def test_a_finished_run_shows_its_best_and_its_alarms(tmp_path):
    line = RunLine.of(folder_of(tmp_path, "a", BASE, BETTER, WORSE, exported=True))
    assert (line.state, line.done, line.planned, line.alarms) == ("done", 4, 4, 2)
    assert (line.score, line.base, line.best, line.best_at) == ("shapes", 0.5, 0.75, 2)


def test_a_run_that_nobody_trains_has_stopped_until_somebody_does(tmp_path):
    folder = folder_of(tmp_path, "a", BASE, BETTER)
    assert RunLine.of(folder).state == "stopped"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert RunLine.of(folder).state == "training"
    assert RunLine.of(folder).state == "stopped"


def test_a_run_that_stopped_itself_says_why_until_it_gets_on(tmp_path):
    folder = folder_of(tmp_path, "a", BASE)
    (folder / "error.txt").write_text("Traceback\n  ...\nValueError: a reward raised\n")
    found = RunLine.of(folder)
    assert (found.state, found.why) == ("failed", "ValueError: a reward raised")
    later = os.stat(folder / "error.txt").st_mtime + 5
    os.utime(folder / "metrics.jsonl", (later, later))
    assert RunLine.of(folder).state == "stopped"


def test_all_runs_of_a_folder_stand_in_a_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    folder_of(tmp_path / "runs", "old", BASE, BETTER, WORSE, exported=True)
    folder_of(tmp_path / "runs", "new", BASE)
    damaged = tmp_path / "runs" / "damaged"
    damaged.mkdir()
    (damaged / "run.yaml").write_text("recipe: [")
    for name, seconds in (("old", 10), ("new", 100)):
        for file in (tmp_path / "runs" / name).glob("*.*"):
            os.utime(file, (seconds, seconds))
    print_runs(list_runs(), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["runs/damaged", "runs/new", "runs/old"]
    assert "shapes 0.500 -> 0.750 at 2" in lines[3] and "done" in lines[3]
    assert lines[-1].startswith("runs/damaged: ")
    print_runs(list_runs(), as_json=True)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {each["run"]: each["state"] for each in found} == {
        "runs/damaged": "unreadable", "runs/new": "stopped", "runs/old": "done",
    }  # fmt: skip


def test_a_folder_without_runs_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run here"):
        print_runs(list_runs(), as_json=False)
    with pytest.raises(UserError, match="no run in"):
        list_runs(tmp_path)


def test_empty_columns_are_left_out():
    assert list(text_table([["a", "b", "c"], ["1", "", "long"]])) == ["a  c", "1  long"]


@pytest.mark.parametrize("part", ["checkpoints/000004", "best", "samples/000004"])
def test_a_folder_inside_a_run_names_the_run(tmp_path, part):
    run = folder_of(tmp_path, "a", BASE)
    (run / part).mkdir(parents=True)
    for read in (open_folder, RunFolder.read):
        with pytest.raises(UserError, match=f"it belongs to the run {run}: name that"):
            read(run / part)
        with pytest.raises(UserError, match=r"it has no run\.yaml$"):
            read(tmp_path)
