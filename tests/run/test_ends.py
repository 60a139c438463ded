"""The ends of a start before the run's own end: each leaves its reason and the page as of then."""

import os
import signal
from pathlib import Path

import pytest
import torch

from flowrl.cli.restarts import _Parent
from flowrl.cli.runs import RunLine
from flowrl.errors import NotFiniteError
from flowrl.pages.records import read_end
from flowrl.run import train
from tests.support import runs

DONE = 2  # iterations before the end; the base alone is evaluated before it


def raising(error: BaseException):
    def end() -> None:
        raise error

    return end


def signalled(number: int):
    return lambda: os.kill(os.getpid(), number)


ENDS = {  # what happens in an iteration: iterations done, state, and the cause
    "a fault": (raising(RuntimeError("shape <mismatch>")), DONE, "failed", "shape <mismatch>"),
    "not finite": (raising(NotFiniteError("the loss is NaN")), DONE, "failed", "the loss is NaN"),
    "memory": (
        raising(torch.OutOfMemoryError("CUDA out of memory")), DONE, "failed", "out of memory",
    ),
    "disk": (raising(OSError(28, "No space left on device")), DONE, "failed", "the disk is full"),
    "SIGTERM": (signalled(signal.SIGTERM), DONE + 1, "stopped", "SIGTERM ended it"),
    "Ctrl-C": (signalled(signal.SIGINT), DONE + 1, "stopped", "SIGINT ended it"),
    "second Ctrl-C": (raising(KeyboardInterrupt()), DONE, "stopped", "KeyboardInterrupt"),
}  # fmt: skip


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_pipeline(tmp_path_factory.mktemp("pipeline") / "sd3")


def small(pipeline: Path, folder: Path, **train: object) -> Path:
    settings = runs.tree(pipeline, folder, runs.NFT, iterations=5, self_test="off", **train)
    settings["evaluate"] |= {"every": 100, "samples": 2, "per_prompt": 1, "steps": 2}
    return runs.write(settings, folder)


def check_end(folder: Path, done: int, state: str, cause: str) -> None:
    """The page, `flowrl runs` and the record say how far the run came, and why it ended."""
    page, line = (folder / "report.html").read_text(), RunLine.of(folder)
    assert f"{state} after {done} of 5 iterations" in page
    assert cause.replace("<", "&lt;").replace(">", "&gt;") in page
    assert (line.state, line.done) == (state, done) and cause in line.why


@pytest.mark.parametrize("end", [
    "a fault", *(pytest.param(name, marks=pytest.mark.slow) for name in ENDS if name != "a fault")
])  # fmt: skip
def test_each_end_is_on_the_page_until_the_run_goes_on(end, pipeline, tmp_path, monkeypatch):
    happens, done, state, cause = ENDS[end]
    iterate = train.iterate

    def ending(stages, progress):
        if progress.iteration == DONE:
            happens()
        return iterate(stages, progress)

    monkeypatch.chdir(tmp_path)
    config = small(pipeline, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(train, "iterate", ending)
        assert train_once(config) != 0
    check_end(Path("run"), done, state, cause)
    if end == "a fault":
        assert runs.flowrl("train", "--resume", "run", "--train.iterations=3") == 0
        assert read_end(Path("run")) is None and RunLine.of(Path("run")).state == "done"
        assert cause not in Path("run/report.html").read_text()


def train_once(config: Path) -> int | BaseException:
    """The code with which a run ends, or what it raises."""
    try:
        return runs.flowrl("train", config, "--folder", "run")
    except (RuntimeError, KeyboardInterrupt) as error:
        return error


@pytest.mark.slow
def test_a_reward_that_raises_and_an_alarm_that_stops(pipeline, tmp_path, monkeypatch) -> None:
    (tmp_path / "once.py").write_text(
        "calls = []\n"
        "def score(samples):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 3:\n"
        "        raise RuntimeError('the server is gone')\n"
        "    return samples.media.mean((1, 2, 3))\n"
    )
    monkeypatch.chdir(tmp_path)
    config = small(pipeline, tmp_path)
    reward = f"--rewards=[{{name: {tmp_path / 'once.py'}:score}}]"
    assert runs.flowrl("train", config, "--folder", "run", reward) == 3
    check_end(Path("run"), 2, "failed", "the server is gone")
    raised = train.raised_by_training

    def at_the_second(session, alarms, metrics, number):
        kept = raised(session, alarms, metrics, number)
        return type(kept)(["it fell."], ["it fell."]) if number == 2 else kept

    monkeypatch.setattr(train, "raised_by_training", at_the_second)
    words = ("train", config, "--folder", "stops", "--train.alarms=stop")
    assert runs.flowrl(*words) == 3
    check_end(Path("stops"), 2, "failed", "stopped by train.alarms: stop; it fell")


def test_a_killed_child_without_restarts_left_has_its_page(tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text("recipe: {name: flow_grpo}\ntrain: {iterations: 5}\n")
    (folder / "metrics.jsonl").write_text('{"iteration": 3, "reward": 1.0}\n')
    assert "3 of 5" not in RunLine.of(folder).why
    sender = _Parent(0, folder)._report(
        -9, "ended by SIGKILL; all of --restarts 0 are used", last=True
    )
    os.waitpid(sender, 0)
    check_end(folder, 3, "failed", "ended by SIGKILL")
