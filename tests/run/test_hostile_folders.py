"""A run's folder made by hand to hang or exhaust whoever reads it: every file of it as a pipe, as a
terabyte of nothing, or with contents without end, read by every command, within bounds."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowrl.bounded_files import (
    MOST_LINE,
    bounded_bytes,
    bounded_json,
    bounded_lines,
    json_object,
    parsed_json,
)
from flowrl.errors import NotFiniteError, UserError
from flowrl.pages import run_folder
from flowrl.pages.run_folder import RunFolder
from flowrl.run.save import checkpoint
from flowrl.run.save.failures import Mistake, starting
from flowrl.session import atomic
from flowrl.session.record import cut_back, last_iteration
from flowrl.session.session import Session
from flowrl.settings.read import run_of
from flowrl.settings.trust import remember
from tests.run.test_run_folders import read_folder
from tests.support import fuzz, runs
from tests.support.damages import HEADERS, MISFITS, TORCH
from tests.support.runs import flowrl
from tests.support.warm import small

TERABYTE = 2**40


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, pipeline: Path) -> Path:
    place = tmp_path_factory.mktemp("finished")
    tree = small(pipeline, place)
    tree["train"]["iterations"] = 2
    assert flowrl("train", runs.write(tree, place), "--folder", place / "run") == 0
    return place / "run"


@pytest.fixture(scope="module")
def kept(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    return runs.session_of(run_of(finished), tmp_path_factory.mktemp("session"))


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return runs.copied_run(finished, tmp_path / "run")


def instead(file: Path, put: Callable[[Path], object]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    put(file)


def empty_terabyte(file: Path) -> None:
    file.touch()
    os.truncate(file, TERABYTE)


HARMS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a terabyte": empty_terabyte,
    "nested": lambda f: f.write_text("[" * 200_000),
    "many values": lambda f: f.write_text("[" + "0," * 7_000_000 + "0]"),
    "a long line": lambda f: f.write_text('{"iteration": "' + "x" * (MOST_LINE + 9) + '"}\n'),
    "many lines": lambda f: f.write_text("{}\n" * 1_500_000),
    "large numbers": lambda f: f.write_text(
        "".join(f'{{"iteration": {n}, "reward": {n}}}\n' for n in (10**400, -(10**4000), 2**70))
    ),
}
FILES = (
    "run.yaml",
    "metrics.jsonl",
    ".lock",
    "error.txt",
    "report/starts.jsonl",
    "report/alarms.jsonl",
    "report/evaluation-000002.json",
    "row_checks.jsonl",
    "checkpoints/000002/state.json",
    "checkpoints/000002/files.json",
    "checkpoints/000002/policies.safetensors",
    "checkpoints/000002/optimizer.pt",
    "report/end.json",
)
QUICK = {("a pipe", name) for name in FILES[::2]} | {("a terabyte", name) for name in FILES[1::2]}
QUICK |= {(harm, "metrics.jsonl") for harm in HARMS if harm != "many lines"}


def cases() -> list[object]:
    pairs = [(harm, name) for harm in HARMS for name in FILES]
    slow = [pytest.mark.slow]
    return [pytest.param(*pair, marks=slow * (pair not in QUICK)) for pair in pairs]


@pytest.mark.parametrize(("harm", "name"), cases())
def test_every_reader_ends_within_bounds(
    harm: str,
    name: str,
    run: Path,
    kept: Session,
    finished: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    instead(run / name, HARMS[harm])
    words = ("runs", run), ("report", run), ("doctor", run)
    for each in (*words, ("compare", run, finished, "--out", run.parent / "page.html")):
        with fuzz.watched():
            assert flowrl(*each) in (0, 1, 2), each
        assert "Traceback" not in capsys.readouterr().err
    with fuzz.watched():
        try:
            read_folder(run, replace(kept, folder=run))
        except (UserError, NotFiniteError) as error:
            fuzz.one_sentence(str(error))


STORED = {
    "policies.safetensors": HEADERS | MISFITS,
    "optimizer.pt": TORCH,
    "budget.pt": {n: d for n, d in TORCH.items() if n != "a part less"},  # it has no tensors
}


@pytest.mark.parametrize(
    ("name", "damage"), [(name, each) for name, damages in STORED.items() for each in damages]
)
def test_a_checkpoint_made_by_hand_is_refused_with_the_way_on(
    name: str, damage: str, run: Path, kept: Session
) -> None:
    """Its list of files fits, so only reading it shows what is wrong; the one before is named."""
    newest, before = run / "checkpoints" / "000002", run / "checkpoints" / "000001"
    assert before.is_dir()
    STORED[name][damage](newest / name)
    (newest / atomic.CONTENTS).unlink()
    (newest / atomic.CONTENTS).write_text(json.dumps(atomic.sums(newest)))
    weights = {n: p.clone() for n, p in kept.learner.policies.parameters.items()}
    with fuzz.watched(), pytest.raises(Mistake) as caught, starting(run):
        read_folder(run, replace(kept, folder=run))
    said = str(caught.value)
    fuzz.one_sentence(said)
    assert f"{newest} " in said and f"whole one before it is {before}" in said, said
    assert "is intact" not in said and said.count("--resume") == 1, said
    assert "--resume" in said and newest.is_dir() and before.is_dir()
    same = (torch.equal(p, weights[n]) for n, p in kept.learner.policies.parameters.items())
    assert all(same), "everything is read before anything changes"


def test_a_damaged_newest_checkpoint_names_the_one_that_is_whole(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And stays, beside the one that takes its place."""
    newest = run / "checkpoints" / "000002"
    (newest / "policies.safetensors").write_bytes(b"")
    assert flowrl("train", "--resume", run) == 0
    said = capsys.readouterr().err
    assert f"{newest} is damaged (policies.safetensors has 0 of " in said
    assert f"this run goes on from {run / 'checkpoints' / '000001'}" in said
    aside = run / "checkpoints" / "damaged-000002"
    assert str(aside) in said and (aside / "optimizer.pt").is_file()
    assert atomic.damage(newest) is None
    assert [line["iteration"] for line in runs.lines(run)] == [0, 1, 2]


def test_a_checkpoint_of_an_older_version_keeps_its_own_way_on(run: Path) -> None:
    with pytest.raises(Mistake) as caught, starting(run):
        raise checkpoint.OlderCheckpoint("it was written before; resume it there")
    assert str(caught.value) == "it was written before; resume it there"


def test_an_iteration_of_a_far_future_takes_no_memory(tmp_path: Path) -> None:
    lines = [{"iteration": 0}, {"iteration": 7}, {"iteration": 10**15}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    said: list[str] = []
    with fuzz.watched():
        cut_back(tmp_path, 10**18, said.append)
    assert "no line for iterations 1 to 6, 8 to 999999999999999, 1000000000000001 to 10" in said[0]
    assert last_iteration(tmp_path / "metrics.jsonl") == 10**15


def test_a_record_with_more_numbers_than_a_page_holds_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "MOST_METRIC_NUMBERS", 10)
    with pytest.raises(UserError, match=r"metrics\.jsonl has more than 10 numbers"):
        RunFolder.read(run)


def test_an_empty_list_of_files_is_damage(run: Path) -> None:
    (run / "checkpoints" / "000002" / atomic.CONTENTS).write_text("{}")
    assert atomic.damage(run / "checkpoints" / "000002") == "files.json lists no file"


def test_all_checkpoints_damaged_is_one_sentence(run: Path) -> None:
    for each in (run / "checkpoints").iterdir():
        (each / "state.json").write_text("")
    with pytest.raises(UserError, match=r"no intact checkpoint .*begin a new run"):
        checkpoint.newest(run, lambda _: None)
    remember(run, {})


def test_bounded_readers(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b'{"a": 1}\n\n{"b": [2]}')
    assert bounded_bytes(file, 99).startswith(b'{"a"')
    assert list(bounded_lines(file, 99)) == [b'{"a": 1}', b"", b'{"b": [2]}']
    file.write_bytes(b"\n" * 1_000_001)
    with pytest.raises(OSError, match="more than 1000000 lines"):
        for _ in bounded_lines(file, 2**30):
            pass
    file.write_bytes(b'{"a": 1}\n\n{"b": [2]}')
    for most in (0, 10):
        with pytest.raises(OSError, match="more than the"):
            bounded_bytes(file, most)
    with pytest.raises(IsADirectoryError):
        bounded_bytes(tmp_path, 99)
    (tmp_path / "link").symlink_to(file)
    assert bounded_bytes(tmp_path / "link", 99)
    with pytest.raises(OSError):
        bounded_bytes(tmp_path / "link", 99, links=False)
    for text in (b"[" * 100_000, b"\xff", b"", b"[1,", b"[" + b"0," * 6_000_000 + b"0]"):
        file.write_bytes(text)
        with fuzz.watched(), pytest.raises(ValueError):
            bounded_json(file, 2**30)
    assert json_object(b"[1]") is None and json_object(b'{"a": [1]}') == {"a": [1]}
    assert parsed_json('{"é": 1}'.encode()) == {"é": 1}
