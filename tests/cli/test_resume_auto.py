"""`train FILE --folder F --resume auto`: one line that begins, goes on, and ends once."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from flowrl.cli import app
from flowrl.cli.ended import EndedBySignal
from flowrl.errors import FolderInUse
from flowrl.session import folder_wait
from flowrl.session.atomic import held
from tests.support import runs
from tests.support.runs import flowrl
from tests.support.warm import Warm

AUTO = ("--resume", "auto")


def written(pipeline: Path, folder: Path, iterations: int = 2) -> Path:
    settings = runs.tree(pipeline, folder, runs.NFT | {"steps": 2, "group": 2})
    settings["train"]["iterations"] = iterations
    settings["evaluate"] |= {"every": 2, "steps": 2, "samples": 2, "per_prompt": 1}
    return runs.write(settings, folder)


def ends(*folders: Path) -> list[bytes]:
    return [
        (run / "checkpoints" / "000002" / "policies.safetensors").read_bytes() for run in folders
    ]


def test_one_line_begins_resumes_and_ends(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, whole, run = written(pipeline, tmp_path), tmp_path / "whole", tmp_path / "run"
    assert flowrl("train", file, "--folder", whole) == 0
    line = ("train", file, "--folder", run, *AUTO)
    assert flowrl(*line, "--train.iterations", "1") == 0  # the folder is absent
    assert flowrl(*line) == 0  # it has one iteration, of two
    assert ends(run) == ends(whole)
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    capsys.readouterr()
    assert flowrl(*line) == 0
    assert f"{run} has finished its 2 iterations\n" in capsys.readouterr().out
    assert flowrl(*line, "--train.iterations", "1") == 0
    said = capsys.readouterr().out
    assert f"{run} has finished its 2 iterations, 1 more than asked for" in said
    ended = ("--train.iterations", "9", "--train.until", "{samples: 1}")
    assert flowrl(*line, *ended) == 0
    said = capsys.readouterr().out
    assert f"{run} has finished after 2 of 9 iterations: train.until: " in said
    assert before == sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    # what the file changes follows the rules of a resume
    file.write_text(file.read_text().replace("alpha: 8", "alpha: 4"))
    assert flowrl(*line, "--train.iterations", "3") == 2
    assert "alpha" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_in_use_is_told_or_waited_for(
    pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(folder_wait, "LOOK_SECONDS", 0.05)
    file, run = written(pipeline, tmp_path, iterations=1), tmp_path / "run"
    line = ("train", file, "--folder", run, *AUTO)
    assert flowrl(*line) == 0
    with held(run):
        assert flowrl(*line, "--train.iterations", "2") == 2
        assert "is being trained by process" in (said := capsys.readouterr().err)
        assert "--wait does so, and then goes on" in said
    held_now, free = threading.Event(), threading.Event()

    def hold() -> None:
        with held(run):
            held_now.set()
            free.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    assert held_now.wait(60)
    threading.Timer(1.0, free.set).start()
    assert flowrl(*line, "--wait", "--train.iterations", "2") == 0
    other.join()
    said = capsys.readouterr().out
    assert f"waiting until {run} is free: {run} is being trained by process " in said
    assert said.count("waiting") == 1
    assert (run / "checkpoints" / "000002").is_dir()


def test_a_wait_says_for_whom_and_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(folder_wait.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(folder_wait.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + 5))
    wait = folder_wait.FolderWait(Path("runs/mine"))
    taken = FolderInUse("runs/mine is being trained by process 7 on node3", ": stop it")
    for _ in range(int(2 * 86400 / 5)):  # two days
        wait.on(taken)
    first, *later = capsys.readouterr().out.splitlines()
    assert first == (
        "waiting until runs/mine is free: runs/mine is being trained by process 7 on node3 "
        "(Ctrl-C ends only the wait)"
    )
    assert later[:3] == [
        f"still waiting, {time} so far: runs/mine is being trained by process 7 on node3"
        for time in ("1:00", "3:00", "7:00")
    ]
    assert 48 <= len(later) <= 54  # then once an hour


@pytest.mark.parametrize(
    ("cause", "code"),
    [(KeyboardInterrupt(), 130), (EndedBySignal(signal.SIGTERM), 128 + signal.SIGTERM)],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_ends_the_wait_alone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cause: KeyboardInterrupt,
    code: int,
) -> None:
    def interrupted(_: float) -> None:
        raise cause

    monkeypatch.setattr(folder_wait.time, "sleep", interrupted)
    wait = folder_wait.FolderWait(Path("runs/mine"))
    monkeypatch.setattr(app, "_run", lambda _: wait.on(FolderInUse("runs/mine is taken", "")))
    assert app.exit_code(["train"]) == code
    assert capsys.readouterr().err == (
        "\nflowrl: the wait for runs/mine has ended; this command changed nothing there\n"
    )


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", "stopped at once; the last checkpoint is complete"),
        ("export", "stopped at once"),  # which writes no checkpoint
    ],
)
def test_only_a_training_that_is_stopped_says_where_its_checkpoint_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, words: str
) -> None:
    def stopped(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "_run", stopped)
    assert app.exit_code([command]) == 130
    assert capsys.readouterr().err == f"\nflowrl: {words}\n"


def test_what_auto_needs_is_said(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(pipeline, tmp_path)
    for words in ((file, *AUTO), ("--folder", "x", *AUTO)):
        assert flowrl("train", *words) == 2
        assert "--resume auto needs a run file and the run's folder" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    assert flowrl("train", file, "--folder", tmp_path / "mine", *AUTO) == 2
    assert "exists, but has no run.yaml" in capsys.readouterr().err
    assert flowrl("train", file, "--wait") == 2
    assert "--wait belongs to --resume auto" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_job_that_is_requeued_at_any_moment(
    pipeline: Path, tmp_path: Path, warm: Warm, seed: int
) -> None:
    """Twenty-five requeues over a run's whole life, by SIGKILL and SIGTERM, some of them while
    another job of the same line runs: the same bits as unbroken."""
    draw = random.Random(seed)
    file, whole, run = written(pipeline, tmp_path, 2), tmp_path / "whole", tmp_path / "run"
    long = ("--train.iterations", "12", "--checkpoint.keep", "20")
    began = time.monotonic()
    assert warm.run("train", file, "--folder", whole, *long, out=tmp_path / "whole.txt") == 0
    life = time.monotonic() - began
    line = ("train", file, "--folder", run, *AUTO, "--wait", *long)
    for number in range(25):
        out = tmp_path / f"{number}.txt"
        jobs = [warm.start(*line, out=out)]
        if number % 5 == 4:  # the queue starts the job twice
            jobs.append(warm.start(*line, out=out.with_suffix(".two.txt")))
        time.sleep(draw.uniform(0.05, 0.25) * life)
        for job in jobs:
            if warm.poll(job) is None:
                os.kill(job, draw.choice((signal.SIGKILL, signal.SIGTERM)))
        for job in jobs:
            assert warm.wait(job) in (0, -signal.SIGKILL, 128 + signal.SIGTERM, -signal.SIGTERM)
    assert warm.run(*line, out=tmp_path / "last.txt") == 0
    last = Path("checkpoints") / "000012" / "policies.safetensors"
    assert (run / last).read_bytes() == (whole / last).read_bytes()
    assert warm.run(*line, out=tmp_path / "after.txt") == 0
    assert "has finished its 12 iterations" in (tmp_path / "after.txt").read_text()
