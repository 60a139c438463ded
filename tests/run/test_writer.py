"""Files are written in a thread: in order, one at a time, from copies; failures end the run."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowrl.errors import UserError
from flowrl.run import train
from flowrl.run.save import checkpoint
from flowrl.run.watch.alarms import Alarms
from flowrl.session.atomic import damage
from flowrl.session.progress import Progress
from flowrl.session.writer import WAITING, FileWriter, copied
from tests.support import runs
from tests.support.iterations import iterate
from tests.support.warm import agree, small


def test_writes_are_done_in_order_one_at_a_time_and_few_wait():
    writer, gate, done, at_once = FileWriter(), threading.Event(), [], []

    def write(number: int):
        at_once.append(number)
        assert gate.wait(30) and len(at_once) == 1
        done.append(at_once.pop())

    def more() -> None:
        for number in range(4):
            writer.write(lambda number=number: write(number))

    with writer.beside():
        caller = threading.Thread(target=more)
        caller.start()
        caller.join(0.2)
        assert caller.is_alive(), "it waits while one is under way and others wait"
        assert len(writer._writes) == 1 + WAITING
        gate.set()
        caller.join(30)
        writer.wait()
    assert done == [0, 1, 2, 3]


def test_a_failure_is_raised_by_the_next_check_and_later_writes_are_done():
    def fails() -> None:
        raise UserError("the disk is full")

    writer, done = FileWriter(), []
    with writer.beside():
        writer.write(fails)
        writer.write(lambda: done.append(1))
        while not done:
            pass
        with pytest.raises(UserError, match="disk is full"):
            writer.check()
        writer.check()  # once is enough
        writer.write(fails)
        with pytest.raises(UserError, match="disk is full"):
            writer.wait()
    with pytest.raises(UserError, match="disk is full"):
        writer.write(fails)  # outside it is done at once


@pytest.mark.parametrize(("error", "count"), [(RuntimeError, 2), (KeyboardInterrupt, 1)])
def test_an_error_lets_writes_end_and_ctrl_c_only_the_one_under_way(error, count):
    writer, gate, begun, done = FileWriter(), threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        assert gate.wait(30)
        done.append(1)

    def ends() -> None:
        with writer.beside():
            writer.write(slow)
            assert begun.wait(30)
            writer.write(lambda: done.append(2))
            threading.Timer(0.1, gate.set).start()
            raise error

    with pytest.raises(error):
        ends()
    assert done == [1, 2][:count]


def test_copies_are_no_views():
    whole = {"a": [torch.ones(2), (torch.zeros(1), 3, None)]}
    copy = copied(whole)
    whole["a"][0].add_(1)
    assert copy["a"][0].tolist() == [1, 1] and copy["a"][1][1:] == (3, None)


@pytest.mark.slow
def test_a_checkpoint_holds_its_moment_whatever_the_run_does_meanwhile(pipeline, tmp_path):
    kept = runs.session(pipeline, tmp_path, runs.NFT, lr=1e-2)  # with an average
    progress, alarms, gate = Progress(), Alarms(), threading.Event()
    iterate(kept, progress)
    checkpoint.save_checkpoint(kept, progress, alarms)
    folder = tmp_path / "checkpoints" / "000001"
    at_once = {path.name: path.read_bytes() for path in folder.iterdir()}
    checkpoint.put_away(folder)
    with kept.writer.beside():
        kept.writer.write(lambda: gate.wait(30))  # the write under way
        checkpoint.save_checkpoint(kept, progress, alarms)
        iterate(kept, progress)
        assert not folder.exists()
        gate.set()
        kept.writer.wait()
    assert damage(folder) is None
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == at_once
    later = kept.learner.policies.state()
    before = load_file(folder / checkpoint.POLICIES_FILE)
    moved = {name.split("/")[0] for name, value in before.items() if (later[name] != value).any()}
    assert "current" in moved and len(moved) > 1  # the average follows


@pytest.mark.slow
def test_best_weights_wait_for_the_checkpoint_that_does_not_know_them(
    pipeline, tmp_path, monkeypatch
):
    kept = runs.session(pipeline, tmp_path, runs.NFT, lr=1e-2)
    progress, gate, order = Progress(), threading.Event(), []
    real = checkpoint.drop_other_best

    def drops(folder: Path, reached: Progress) -> None:
        assert gate.wait(30)
        order.append(("drop", reached.best_iteration))
        real(folder, reached)

    monkeypatch.setattr(checkpoint, "drop_other_best", drops)
    monkeypatch.setattr(
        checkpoint, "export", lambda *_, **__: order.append(("best", progress.iteration))
    )
    with kept.writer.beside():
        train.evaluate_and_keep(kept, progress)
        checkpoint.save_checkpoint(kept, progress, Alarms())
        progress.iteration, progress.best = 1, -1.0
        threading.Timer(0.1, gate.set).start()
        train.evaluate_and_keep(kept, progress)
    assert order == [("best", 0), ("drop", 0), ("best", 1)]


@pytest.mark.slow
def test_a_write_that_fails_ends_the_run_with_its_sentence(pipeline, tmp_path, monkeypatch, capfd):
    settings = runs.tree(pipeline, tmp_path, runs.NFT, iterations=6)
    real = checkpoint.write_folder

    def write(folder: Path, *rest: object, **named: object) -> None:
        if folder.name == "000002" and folder.parent.name == "checkpoints":
            raise UserError(f"{folder} could not be written: the disk is full")
        real(folder, *rest, **named)

    monkeypatch.setattr(checkpoint, "write_folder", write)
    run = tmp_path / "run"
    assert runs.flowrl("train", runs.write(settings, tmp_path), "--folder", run) != 0
    said = capfd.readouterr().err
    assert "000002 could not be written: the disk is full" in said and "--resume" in said
    assert len(runs.lines(run)) in (3, 4)  # it ended at once, or one iteration later
    monkeypatch.setattr(checkpoint, "write_folder", real)
    assert runs.flowrl("train", "--resume", run) == 0
    assert [line["iteration"] for line in runs.lines(run)] == list(range(7))


def train_and_die(config: Path, folder: Path, moment: str) -> None:
    """Train until the second checkpoint's write; die in it once the run has gone on beside it."""

    def dies(*_: object) -> None:
        end = time.monotonic() + 60  # the next line is written before the checkpoint after it
        while len(runs.lines(folder)) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    real = checkpoint.SavedState.write

    def write(self, run_folder: Path, progress: Progress, keep: int) -> None:
        if progress.iteration == 1 and moment == "in the folder":
            checkpoint.torch.save = dies
        if progress.iteration == 1 and moment == "before the old best is dropped":
            checkpoint.drop_other_best = dies
        real(self, run_folder, progress, keep)

    checkpoint.SavedState.write = write
    runs.flowrl("train", config, "--folder", folder)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["in the folder", "before the old best is dropped"])
def test_killed_in_a_write_beside_the_run_it_ends_as_if_nothing_had_happened(
    pipeline, tmp_path, moment
):
    settings = small(pipeline, tmp_path)
    settings["evaluate"]["every"] = 4  # an evaluation waits for the write before it keeps the best
    config, folder = runs.write(settings, tmp_path), tmp_path / "run"
    unbroken = tmp_path / "unbroken"
    child = multiprocessing.get_context("fork").Process(
        target=train_and_die, args=(config, folder, moment)
    )
    child.start()
    child.join(240)
    assert child.exitcode == -signal.SIGKILL
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert ("000001" in left) == (moment != "in the folder")
    assert len(runs.lines(folder)) >= 3, "the run had gone on"
    assert runs.flowrl("train", "--resume", folder) == 0
    assert runs.flowrl("train", config, "--folder", unbroken) == 0
    agree(folder, unbroken)
