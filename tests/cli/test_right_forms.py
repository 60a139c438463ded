"""Messages of commands that name the right form: the same command in that form goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowrl.cli.app import path_command
from flowrl.cli.completion import completion_command
from flowrl.cli.launch import LaunchArguments, job_of
from flowrl.cli.restarts import supervised
from flowrl.cli.runs import run_lines
from flowrl.pages import run_folder
from flowrl.pages.compare_page import write_comparison
from flowrl.pages.run_folder import RunFolder
from flowrl.paths import run_file
from tests.support.advice import advice

RUN = "recipe: {name: flow_grpo}\ntrain: {iterations: 4}\n"


def run_in(folder: Path) -> Path:
    """A run's folder: its settings, and the numbers of two iterations."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(RUN)
    lines = [{"iteration": i, "held_out/shapes": 0.5} for i in (0, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_command_with_the_words_that_it_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    file = "configs/accelerate/ddp.yaml"
    advice(
        "path: name one file, such as configs/accelerate/ddp.yaml",
        lambda: path_command([]),
        lambda: path_command([file]),
    )
    assert capsys.readouterr().out.endswith(f"{file}\n")
    for wrong in ([], ["tcsh"], ["bash", "zsh"]):
        advice(
            "completion: give a shell, one of {}",
            lambda words=wrong: completion_command(words),
            lambda: completion_command(["zsh"]),
        )
    assert "flowrl" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["slurm", "ray", "sky", "k8s", "accelerate"])
def test_a_job_with_what_it_lacks(place: Any) -> None:
    def job(**settings: Any) -> Any:
        words = {"folder": Path("/runs/r"), "cpus": 1} | settings
        return job_of(LaunchArguments(place, "demo", **words), [])

    advice(
        "launch {}: name the run's folder with --folder: every start resumes the run",
        lambda: job(folder=None),
        job,
    )
    advice(
        "--gpus 0: give --cpus in its place",
        lambda: job(gpus=0, cpus=None),
        lambda: job(cpus=1),
    )
    for both in ({"gpus": None, "cpus": None}, {"gpus": 1, "cpus": 1}):
        for one in ({"gpus": 1, "cpus": None}, {"gpus": None, "cpus": 2}):
            advice(
                "give either --gpus, those of each machine, or --cpus, the processes on each",
                lambda words=both: job(**words),
                lambda words=one: job(**words),
            )


def test_names_and_times_of_a_job_in_the_form_that_is_named() -> None:
    def job(**settings: Any) -> Any:
        return job_of(LaunchArguments("slurm", "demo", Path("r"), cpus=1, **settings), [])

    for time in ("24:00:00", "2-12:00:00"):
        advice(
            "is not a time of Slurm's: give hours, minutes and seconds, such as 24:00:00, or days",
            lambda: job(time="a day"),
            lambda right=time: job(time=right),
        )
    for name in ("partition", "account"):
        advice(
            "is not a name: give one without spaces",
            lambda option=name: job(**{option: "two words"}),
            lambda option=name: job(**{option: "one-word"}),
        )


def test_restarts_are_the_launchers_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    train = ["train", "demo"]
    words, code = advice(
        "is for single-process runs, but this one has a launcher: pass `--max_restarts {}` to",
        lambda: supervised([*train, "--restarts", "3"]),
        lambda: supervised([*train, "--folder", "r"]),
    )
    assert (words, code) == ([*train, "--folder", "r"], None)
    advice(
        "is given twice, with {} and {}: keep one",
        lambda: supervised([*train, "--restarts", "3", "--restarts=4"]),
        lambda: supervised(train),
    )


def test_runs_are_listed_of_a_run_or_of_a_folder_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    run = run_in(tmp_path / "all" / "first")
    for wrong in ([], [tmp_path / "empty"]):
        for right in (run, run.parent):
            listed = advice(
                "runs: no run {}: give the folder of a run, or one that contains runs",
                lambda folders=wrong: run_lines(folders),
                lambda folder=right: run_lines([folder]),
            )
            assert [line.run for line in listed] == [str(run)]


def test_a_comparison_has_several_runs(tmp_path: Path) -> None:
    one, two = run_in(tmp_path / "one"), run_in(tmp_path / "two")
    page = tmp_path / "page.html"
    for wrong in ([], [one], [one] * 13):
        advice(
            "compare: give 2 to {} runs; `flowrl report RUN` shows a single run",
            lambda folders=wrong: write_comparison(folders, page),
            lambda: write_comparison([one, two], page),
        )
        assert page.is_file()
        page.unlink()


def test_a_table_of_too_many_numbers_is_moved_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path / "run")
    monkeypatch.setattr(run_folder, "MOST_METRIC_NUMBERS", 3)
    read = advice(
        "numbers, which no page can show: move it away",
        lambda: RunFolder.read(run),
        lambda: (run / "metrics.jsonl").rename(tmp_path / "away") and RunFolder.read(run),
    )
    assert not read.metrics


def test_a_folder_in_place_of_a_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_in(tmp_path / "mine")
    run_in(tmp_path / "demo")
    (tmp_path / "plain").mkdir()
    advice(
        "is a folder: give a run file, such as configs/demo.yaml",
        lambda: run_file("plain"),
        lambda: run_file("configs/demo.yaml"),
    )
    found = advice(
        "{} is a folder: write {}", lambda: run_file("mine"), lambda: run_file("mine/run.yaml")
    )
    assert yaml.safe_load(found.read_text()) == yaml.safe_load(RUN)
    for right in ("demo/run.yaml", "configs/demo.yaml"):
        found = advice(
            "is a run's folder and the name of one of flowrl's runs: write {} or {}",
            lambda: run_file("demo"),
            lambda word=right: run_file(word),
        )
        assert found.is_file()
