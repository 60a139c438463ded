"""Faults of a drill, on trainings that keep what is promised and on such that break one promise."""

import json
import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from safetensors.numpy import save_file

from flowrl.cli.drill import _copy
from flowrl.drill import faults
from flowrl.drill.faults import Drill, faults_of
from flowrl.drill.proxy import Proxy
from flowrl.drill.same_end import differences, metric_lines
from flowrl.drill.training import DrilledProgram, begun
from tests.drill import stand_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals by files of processes")


@pytest.fixture
def drill_of(tmp_path, monkeypatch):
    """A drill of a stand-in's run."""
    monkeypatch.setattr(faults, "STOPPED_SECONDS", 1.0)
    monkeypatch.setattr(faults, "ORPHAN_SECONDS", 1.5)
    python = tmp_path / "python"
    place = Path(stand_in.__file__)
    # `python -m flowrl train ...` of another environment
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {place} flowrl "$@"\n')
    python.chmod(0o755)

    def make(broken: str = "", iterations: int = 4) -> Drill:
        run = tmp_path / "run"
        run.mkdir()
        (run / "run.yaml").write_text(yaml.safe_dump({"train": {"iterations": 2}}))
        (run / "metrics.jsonl").write_text(json.dumps({"iteration": 0}) + "\n")
        assert stand_in.train(run, "", resumed=False) == 0
        (run / "breaks").write_text(broken)
        (tmp_path / "copies").mkdir()
        drill = Drill(
            DrilledProgram(str(python), False, tmp_path / "state"), run, tmp_path / "copies", [],
            2 + iterations, 6.0, random.Random(0), lambda folder: _copy(run, folder, 6, {}),
        )  # fmt: skip
        drill.train_unbroken()
        return drill

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    yield make
    signal.signal(signal.SIGTERM, before[0])
    signal.signal(signal.SIGHUP, before[1])


def fault(name: str):
    found = faults_of(
        ("kills", "ends", "hangs", "fills", "cuts", "records"), DrilledProgram("", True, Path())
    )
    return next(call for what, call in found if name in what)


ALL = [
    "at a random moment", "writes a checkpoint", "restarted copy twice", "SIGTERM", "SIGHUP",
    "supervisor", "SIGSTOP", "small tmpfs", "metrics.jsonl", "strict JSON",
]  # fmt: skip


@pytest.mark.slow
def test_a_training_that_keeps_its_promises_passes(drill_of):
    drill = drill_of()
    for name in ALL:
        outcome = fault(name)(drill)
        assert outcome.right, (name, outcome)
        if outcome.tried and name not in ("metrics.jsonl", "strict JSON"):
            assert outcome.equal and outcome.without is not None, (name, outcome)
    assert not fault("its servers")(drill).tried


@pytest.mark.parametrize(("broken", "name", "said"), [
    ("hangup", "SIGHUP", "SIGHUP lost"),
    ("nan", "strict JSON", "no JSON: NaN"),
    pytest.param("second", "twice", "never came back", marks=pytest.mark.slow),
    pytest.param("orphan", "supervisor", "went on alone", marks=pytest.mark.slow),
    pytest.param("bits", "random moment", "has other weights", marks=pytest.mark.slow),
    pytest.param("silent", "metrics.jsonl", "taken in silence", marks=pytest.mark.slow),
    pytest.param("disk", "tmpfs", "must end a run with exit code 3", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_broken_promise_is_found(broken, name, said, drill_of):
    outcome = fault(name)(drill_of(broken))
    if not outcome.tried:
        pytest.skip(outcome.notes[0])
    assert not outcome.right and said in "; ".join(outcome.notes), outcome


@pytest.mark.parametrize(("numbers", "checkpoint", "removed"), [
    ([0, 1], 1, 1),
    ([1], 1, 1),
    ([0, 1, 2, 3, 4], 4, 3),
    ([0, 1, 2, 3, 4, 5, 6], 2, 1),  # killed four iterations after its checkpoint
    ([0], 1, None),
])  # fmt: skip
def test_the_removed_line_is_one_that_is_promised(numbers, checkpoint, removed, tmp_path):
    """However short the run is, and wherever it was killed."""

    def make(folder: Path) -> None:
        (folder / "checkpoints" / f"{checkpoint:06d}").mkdir(parents=True)
        lines = [json.dumps({"iteration": number}) + "\n" for number in numbers]
        (folder / "metrics.jsonl").write_text("".join(lines))

    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho metrics.jsonl has a gap\n")
    python.chmod(0o755)
    program = DrilledProgram(str(python), False, tmp_path / "state")
    drill = Drill(program, tmp_path, tmp_path, [], 9, 30.0, random.Random(0), make)
    outcome = faults.cut_record(drill)
    kept = [line["iteration"] for line in metric_lines(tmp_path / "record")]
    assert outcome.right and outcome.tried == (removed is not None)
    assert kept == [number for number in numbers if number != removed]


@pytest.mark.quick_cases("True")
@pytest.mark.parametrize("told", [True, False])
def test_one_of_several_stays_stopped_until_another_one_says_so(told, drill_of, monkeypatch):
    monkeypatch.setattr(faults, "TELLING_SECONDS", 20.0 if told else 0.5)
    drill = drill_of("told" if told else "")
    drill.program.processes = 2
    began = time.monotonic()
    outcome = fault("SIGSTOP")(drill)
    assert outcome.right == told and time.monotonic() - began < 15, outcome
    said = "; ".join(outcome.notes)
    assert ("process 1 has waited 60 s for process 0" if told else "without a word") in said


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["", "disk"])
def test_a_full_disk_under_a_launcher_has_its_code_and_the_run_s_sentence(broken, drill_of):
    drill = drill_of(broken)
    drill.program.processes = 2
    outcome = fault("tmpfs")(drill)
    if not outcome.tried:
        pytest.skip(outcome.notes[0])
    assert outcome.right == (broken == ""), outcome
    assert outcome.equal or "and torchrun then with 1" in outcome.notes[-1]


@pytest.mark.parametrize(("text", "last"), [
    ("flowrl: the disk is full\n====\nflowrl FAILED\nexitcode: 3\n====\n", "the disk is full"),
    ("iteration 4\n  KeyError: 'x'\n-----\n\n", "KeyError: 'x'"),
    ("\n\n", "it wrote nothing"),
])  # fmt: skip
def test_what_a_training_said_last_is_no_launcher_s_frame(text, last):
    assert faults._last(text).endswith(last)


def test_nothing_that_was_started_is_alive_afterwards(tmp_path):
    """A training whose child has a session of its own, and ignores what it can."""
    python = tmp_path / "python"
    code = "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\nos.setsid()\ntime.sleep(60)"
    python.write_text(f"#!/bin/sh\n{sys.executable} -c '{code}' {tmp_path} &\nsleep 60\n")
    python.chmod(0o755)
    program = DrilledProgram(str(python), False, tmp_path / "state")
    with begun(program, [], tmp_path, tmp_path / "out") as training:
        training.until(lambda: len(alive(tmp_path)) >= 2, 10)
    assert not alive(tmp_path)


def alive(mark: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if any(str(mark) in word for word in words):
                found.append(" ".join(words))
    return found


def test_ends_differ_by_weights_lines_and_checkpoints(tmp_path):
    runs = []
    for name in ("one", "other"):
        run = tmp_path / name
        run.mkdir()
        (run / "run.yaml").write_text(yaml.safe_dump({"train": {"iterations": 2}}))
        (run / "metrics.jsonl").write_text(json.dumps({"iteration": 0}) + "\n")
        stand_in.train(run, "", resumed=False)
        runs.append(run)
    one, other = runs
    assert differences(one, other) == []
    lines = (one / "metrics.jsonl").read_text().splitlines(keepends=True)
    (one / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert differences(one, other) == ["metrics.jsonl has the iterations 0, 1, not 0, 1, 2"]
    (one / "metrics.jsonl").write_text("".join(lines).replace('"loss": ', '"loss": 1'))
    assert differences(one, other) == ["metrics.jsonl differs in iteration 1: loss"]
    (one / "metrics.jsonl").write_text("".join(lines))
    (one / "checkpoints/000002/optimizer.pt").write_bytes(b"1")
    assert differences(one, other) == ["checkpoints/000002/optimizer.pt differs"]
    save_file({"w": np.zeros(4)}, one / "adapter/adapter.safetensors")
    assert "adapter/adapter.safetensors has other weights" in differences(one, other)
    (one / "adapter/adapter.safetensors").unlink()
    assert "adapter/adapter.safetensors is missing" in differences(one, other)


def test_a_proxy_hands_on_until_it_is_cut():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            while True:
                try:
                    one = server.accept()[0]
                except OSError:
                    return
                one.sendall(one.recv(99))

        threading.Thread(target=echo, daemon=True).start()
        with Proxy("127.0.0.1", server.getsockname()[1]) as proxy:
            with socket.create_connection(("127.0.0.1", proxy.port), 5) as one:
                one.sendall(b"hi")
                assert one.recv(9) == b"hi"
                proxy.cut.set()
                one.settimeout(5)
                assert one.recv(9) == b""
            with socket.create_connection(("127.0.0.1", proxy.port), 5) as one:
                assert one.recv(9) == b""
            proxy.cut.clear()
            with socket.create_connection(("127.0.0.1", proxy.port), 5) as one:
                one.sendall(b"again")
                assert one.recv(9) == b"again"


def test_a_copy_has_the_newest_checkpoint_and_the_drills_settings(tmp_path, drill_of):
    drill = drill_of()
    run = drill.run
    (run / ".lock").write_text("")
    tree = {"train": {"iterations": 2, "lr": 1}, "track": {"with": ["wandb"], "images": 4},
            "rewards": [{"name": "remote", "url": "http://host:8100/x"}]}  # fmt: skip
    (run / "run.yaml").write_text(yaml.safe_dump(tree))
    with Proxy("host", 8100) as proxy:
        _copy(run, tmp_path / "copy", 9, {"http://host:8100/x": proxy})
        copied = yaml.safe_load((tmp_path / "copy/run.yaml").read_text())
        assert copied["rewards"][0]["url"] == f"http://127.0.0.1:{proxy.port}/x"
    assert copied["train"] == {"iterations": 9, "lr": 1} and copied["track"] == {"images": 4}
    assert copied["checkpoint"] == {"every": faults.EVERY}
    assert os.listdir(tmp_path / "copy/checkpoints") == ["000002"]
    assert not (tmp_path / "copy/.lock").exists()
    assert yaml.safe_load((run / "run.yaml").read_text()) == tree


@pytest.mark.parametrize("limited", [True, False])
def test_a_copy_of_a_limited_run_names_its_own_files(limited, tmp_path, drill_of):
    run, copy = drill_of().run, tmp_path / "copy"
    tree = {"prompts": {"train": f"{run.resolve()}/prompts.jsonl", "held_out": "/other.jsonl"}}
    (run / "run.yaml").write_text(yaml.safe_dump(tree))
    _copy(run, copy, 9, {}, limited)
    copied = yaml.safe_load((copy / "run.yaml").read_text())["prompts"]
    assert copied["train"] == str((copy if limited else run).resolve() / "prompts.jsonl")
    assert copied["held_out"] == "/other.jsonl"


@pytest.mark.slow
def test_a_flowrl_in_the_working_folder_is_not_the_drilled_one(tmp_path, monkeypatch):
    """As in a source tree, where another environment is drilled: also below a launcher."""
    other, here = tmp_path / "environment", tmp_path / "here"
    for place, said in ((other, "the drilled one"), (here, "the working folder's")):
        (place / "flowrl").mkdir(parents=True)
        (place / "flowrl/__init__.py").touch()
        (place / "flowrl/__main__.py").write_text(f"print({said!r})")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(other))
    for processes in (1, 2):
        program = DrilledProgram(sys.executable, False, tmp_path / "state", processes)
        with begun(program, [], tmp_path, tmp_path / f"out-{processes}") as training:
            assert training.wait(60) == 0
        said = training.text()
        assert "the drilled one" in said and "the working folder's" not in said
