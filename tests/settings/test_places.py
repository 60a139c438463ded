"""Paths in a run's file: beside the file first, then the working folder, and kept in full."""

from pathlib import Path

import pytest
import yaml

from flowrl.errors import UserError
from flowrl.paths import PROJECT
from flowrl.settings.file.places import in_full
from flowrl.settings.read import dump, read_run, run_from, run_of
from tests.support import runs
from tests.support.advice import advice
from tests.support.runs import NFT
from tests.support.runs import flowrl as command_line

OWN = "def bright(samples):\n    return samples.media.flatten(1).mean(1)\n"


@pytest.fixture
def file(pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's file `f/tiny.yaml` with all it names beside it; the working folder is its parent."""
    inner = tmp_path / "f"
    inner.mkdir()
    (inner / "model").symlink_to(pipeline)
    (inner / "own.py").write_text(OWN)
    tree = runs.tree(pipeline, inner, NFT)
    tree["model"]["pipeline"] = "model"
    tree["prompts"] |= {"train": "prompts.jsonl", "held_out": ["prompts.jsonl", "more.jsonl"]}
    (inner / "more.jsonl").write_text('{"prompt": "a dog"}\n')
    tree["rewards"] = {"own.py:bright": 1.0}
    tree["held_out_rewards"] = [{"name": "clipped", "reward": "own.py:bright", "high": 0.5}]
    monkeypatch.chdir(tmp_path)
    return runs.write(tree, inner)


def test_a_file_names_what_lies_beside_it(file: Path) -> None:
    run, inner = read_run(file), file.parent
    assert run.model.pipeline == str(inner / "model")
    assert run.prompts.train[0].source == str(inner / "prompts.jsonl")
    assert [each.label for each in run.prompts.held_out or ()] == ["prompts.jsonl", "more.jsonl"]
    assert run.rewards[0].name == f"{inner / 'own.py'}:bright"
    assert (run.rewards[0].label, run.rewards[0].weight) == ("bright", 1.0)
    assert run.held_out_rewards[0].settings["reward"] == f"{inner / 'own.py'}:bright"
    assert read_run(Path("f/tiny.yaml")) == run


def test_one_that_only_the_working_folder_has_is_named(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file.parent / "own.py").rename("own.py")
    run = read_run(file)
    assert run.rewards[0].name == "own.py:bright"
    said = capsys.readouterr().err
    assert f"own.py is not in {file.parent}: using {Path.cwd() / 'own.py'}" in said


def test_two_that_differ_are_refused_and_equal_ones_are_not(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("prompts.jsonl").write_text((file.parent / "prompts.jsonl").read_text())
    assert read_run(file).prompts.train[0].source == str(file.parent / "prompts.jsonl")
    Path("prompts.jsonl").write_text('{"prompt": "another"}\n')
    with pytest.raises(
        UserError, match=r"prompts.jsonl is both .*, and the two differ: write the absolute path"
    ):
        read_run(file)
    assert command_line("plan", file) == 2
    assert "the two differ" in capsys.readouterr().err
    Path("prompts.jsonl").unlink()
    Path("model").mkdir()
    for place in (file.parent / "model", Path("model")):
        run = advice(
            "{} is both {} and, from the working folder, {}, and the two differ: write the "
            "absolute path of the one to use",
            lambda: read_run(file),
            lambda place=place: read_run(naming(file, place.absolute())),
        )
        assert run.model.source == str(place.absolute())


def naming(file: Path, model: Path) -> Path:
    """A run's file beside another one, whose model is at this path."""
    text = file.read_text()
    assert "pipeline: model\n" in text
    other = file.with_name("other.yaml")
    other.write_text(text.replace("pipeline: model\n", f"pipeline: {model}\n"))
    return other


def test_paths_of_a_base_are_beside_the_base(file: Path) -> None:
    other = Path("other")
    other.mkdir()
    (other / "run.yaml").write_text(f"base: ../{file.parent.name}/tiny.yaml\n")
    base, run = read_run(file), read_run(other / "run.yaml")
    assert [Path(each.model.pipeline).resolve() for each in (run, base)] == [
        (file.parent / "model").resolve()
    ] * 2
    assert Path(run.rewards[0].name).resolve() == Path(base.rewards[0].name)


def test_files_of_flowrl_and_other_words_stay_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    demo = dump(read_run(Path("configs/demo.yaml")))
    assert in_full(demo) == demo
    words = {"rewards": [{"name": "shapes", "kind": "docs"}], "model": {"dtype": "docs"}}
    assert in_full(words) == words
    assert in_full({"model": "docs"}) == {"model": str(PROJECT / "docs")}


@pytest.mark.slow
@pytest.mark.long
def test_a_run_keeps_what_another_folder_needs(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    short = ("--train.iterations", "1", "--evaluate.samples", "4", "--evaluate.every", "1")
    assert command_line("train", "tiny.yaml", "--folder", "run", *short) == 0
    kept = yaml.safe_load(Path("run/run.yaml").read_text())
    assert kept["rewards"][0]["name"] == f"{file.parent / 'own.py'}:bright"
    assert kept["prompts"]["held_out"][0]["name"] == "prompts.jsonl"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "own.py").write_text("def bright(samples):\n    raise KeyError('another')\n")
    monkeypatch.chdir(elsewhere)
    assert command_line("evaluate", file.parent / "run", "--alone") == 0


def test_a_run_begun_with_relative_paths_stays_as_it_is(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("old")
    folder.mkdir()
    tree = yaml.safe_load(file.read_text())
    tree["rewards"] = [{"name": "own.py:bright"}]
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    (folder / "own.py").write_text(OWN)
    tree["model"]["lora"]["dtype"] = "float32"  # that of runs from before the setting
    assert run_of(folder, trust=True) == run_from(tree, "test")
    assert not capsys.readouterr().err
