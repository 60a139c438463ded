"""Trackers that raise, hang or are slow: the run goes on, and ends with its weights."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from flowrl.run.show import mirror, track
from flowrl.run.show.mirror import Mirror
from tests.support import runs
from tests.support.runs import flowrl, lines
from tests.support.warm import small


class Stub:
    """A tracker; each of its methods is one of a test's."""

    name = "stub"

    def __init__(self, log: Callable[..., Any], finish: Callable[[], Any]) -> None:
        self.log, self.finish = log, finish

    def store_init_configuration(self, _: Any) -> None: ...


def stubbed(monkeypatch, log: Callable[..., Any], finish: Callable[[], Any]) -> None:
    start = Accelerator.init_trackers

    def init(self, *given, **named):
        start(self, *given, **named)
        self.trackers.append(Stub(log, finish))

    monkeypatch.setattr(Accelerator, "init_trackers", init)


def nothing(*_: Any, **__: Any) -> None: ...


def raising(error: BaseException) -> Callable[..., None]:
    def raises(*_: Any, **__: Any) -> None:
        raise error

    return raises


def hangs(*_: Any, **__: Any) -> None:
    threading.Event().wait(600)


@pytest.fixture
def config(pipeline, tmp_path) -> Path:
    tree = small(pipeline, tmp_path)
    tree["train"]["alarms"] = "off"  # the only warnings are those of trackers
    return runs.write(tree, tmp_path)


@pytest.mark.quick_cases("OSError")
@pytest.mark.parametrize(
    ("log", "finish"),
    [
        (raising(OSError("no space")), nothing),
        (raising(KeyError("run")), nothing),
        (raising(BrokenPipeError("service")), nothing),
        (raising(SystemExit(1)), nothing),
        (hangs, nothing),
        (nothing, raising(RuntimeError("offline"))),
        (nothing, hangs),
    ],
    ids=["OSError", "KeyError", "BrokenPipe", "exit", "hang", "finish", "finish-hang"],
)
def test_a_run_ends_with_its_weights_whatever_a_tracker_does(
    config, tmp_path, monkeypatch, capsys, log, finish
):
    monkeypatch.setattr(track, "DEADLINE", 0.5)
    stubbed(monkeypatch, log, finish)
    began = time.monotonic()
    assert flowrl("train", config, "--folder", tmp_path / "run") == 0
    assert time.monotonic() - began < 30
    assert runs.weights(tmp_path / "run")
    assert [line["iteration"] for line in lines(tmp_path / "run")] == [0, 1, 2, 3, 4]
    said = capsys.readouterr().err
    assert said.count("a record was lost") <= 1 and said.count("warning: ") in (1, 2)
    if log not in (nothing, hangs):
        assert "tracker stub: 5 of 5 records are missing" in said


def test_a_run_without_services_leaves_no_thread(config, tmp_path):
    before = set(threading.enumerate())
    options = ("--train.iterations", "1")
    assert flowrl("train", config, "--folder", tmp_path / "run", *options) == 0
    assert "trackers" not in {thread.name for thread in set(threading.enumerate()) - before}


@pytest.mark.slow
def test_a_tracker_gets_every_record_in_order(config, tmp_path, monkeypatch, capsys):
    found: list[Any] = []

    def log(values: dict[str, float], step: int) -> None:
        time.sleep(0.02)
        found.append((step, values))

    stubbed(monkeypatch, log, lambda: found.append("finished"))
    assert flowrl("train", config, "--folder", tmp_path / "run") == 0
    assert found.pop() == "finished"
    kept = [{"iteration": step} | values for step, values in found]
    assert json.dumps(kept) == json.dumps(lines(tmp_path / "run"))
    assert "tracker" not in capsys.readouterr().err


def test_a_tracker_that_is_slower_than_the_run_loses_records(monkeypatch):
    monkeypatch.setattr(mirror, "MOST_WAITING", 2)
    said: list[str] = []
    slow, gate = Mirror(said.append), threading.Event()
    run = threading.Thread(target=lambda: [slow.pass_on("stub", gate.wait) for _ in range(6)])
    run.daemon = True
    run.start()
    run.join(5.0)
    assert not run.is_alive(), "the run waits for its tracker"
    assert slow.lost["stub"] in (3, 4) and len(said) == 1 and "slower than the run" in said[0]
    gate.set()
    slow.end([("stub", nothing)], 5.0)
    assert "of 6 records are missing" in said[1] and len(said) == 2
