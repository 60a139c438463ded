"""Damaged run folders: a sentence, never a traceback, and nothing lost without a word."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.run import atomic, checkpoint, monitor
from flowrl.run.checkpoint import Progress
from flowrl.run.record import cut_back
from tests.support import runs
from tests.support.runs import flowrl, lines
from tests.support.warm import small


@pytest.fixture(scope="module")
def finished(tmp_path_factory, pipeline) -> Path:
    place = tmp_path_factory.mktemp("finished")
    tree = small(pipeline, place)
    tree["train"]["iterations"] = 2
    assert flowrl("train", runs.write(tree, place), "--folder", place / "run") == 0
    return place / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def lists(folder: Path, text: str) -> None:
    (max((folder / "checkpoints").iterdir()) / "files.json").write_text(text)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "lock": (lambda run: (run / ".lock").write_bytes(b"\xff\xfe\n\x00x"), "had this run"),
    "empty list": (lambda run: lists(run, "[]"), "files.json is not a list of files"),
    "no sums": (lambda run: lists(run, '{"state.json": 3}'), "has no size and sum of state.json"),
    "nested": (lambda run: lists(run, "[" * 100_000), "files.json is not readable"),
    "superscript": (lambda run: (run / "checkpoints" / "0²").mkdir(), "going on after iteration 2"),
    "not UTF-8": (
        lambda run: (run / "metrics.jsonl").write_bytes(
            b"\xff\xfe\n" + (run / "metrics.jsonl").read_bytes()
        ),
        "line 1 is damaged",
    ),
    "no iteration": (
        lambda run: (run / "metrics.jsonl").write_text(
            '{"reward": 1}\n' + (run / "metrics.jsonl").read_text()
        ),
        "line 1 is damaged",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_resumed_with_a_sentence(run, capsys, name):
    harm, words = DAMAGES[name]
    harm(run)
    assert flowrl("train", "--resume", run) == 0
    shown = capsys.readouterr()
    assert words in shown.out + shown.err and "Traceback" not in shown.err
    assert [line["iteration"] for line in lines(run)] == [0, 1, 2]


def test_a_torn_line_loses_no_line_behind_it(tmp_path):
    warnings: list[str] = []
    written = ['{"iteration": 0}', '{"itera', "[1]", "null", '{"iteration": true}']
    written += ['{"iteration": 3}', '{"iteration": 4}', '{"iter']
    (tmp_path / "metrics.jsonl").write_text("\n".join(written))
    cut_back(tmp_path, 3, warnings.append)
    assert [line["iteration"] for line in lines(tmp_path)] == [0, 3]
    assert ["line 2" in w or "line 3" in w or "line 4" in w or "line 5" in w for w in warnings] == [
        True
    ] * 4


def test_damage_of_the_best_weights_is_said(run, capsys):
    (best,) = (run / "best").iterdir()
    file = next(best.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert flowrl("train", "--resume", run, "--train.iterations", "3") == 0
    assert f"{best} is damaged ({file.name} has" in capsys.readouterr().err
    assert [path.name for path in (run / "best").iterdir()] == ["000003"]
    assert atomic.damage(run / "best" / "000003") is None


def test_the_older_best_stays_until_a_checkpoint_knows_of_the_new_one(
    pipeline, tmp_path, monkeypatch
):
    """Killed in between, a run came back to a checkpoint whose best weights were gone."""
    kept = runs.session(pipeline, tmp_path, runs.NFT)
    progress = Progress()
    checkpoint.keep_best(kept.learner, kept.folder, progress, 0.1)
    checkpoint.save_checkpoint(kept, progress, monitor.Alarms())
    progress.iteration = 1
    assert checkpoint.keep_best(kept.learner, kept.folder, progress, 0.2)
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["000000", "000001"]
    saved = json.loads((tmp_path / "checkpoints" / "000000" / "state.json").read_text())
    old = Progress(**saved["progress"])
    checkpoint.check_best(tmp_path, old, pytest.fail)
    assert old.best == 0.1
    checkpoint.save_checkpoint(kept, progress, monitor.Alarms())
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["000001"]
    shutil.copytree(tmp_path / "best" / "000001", tmp_path / "best" / "000007")
    checkpoint.drop_other_best(tmp_path, progress)  # as a resume does: a later one is done again
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["000001"]
