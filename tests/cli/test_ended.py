"""Whatever ends a command but SIGKILL: its exit code, and no folder, file or process of it left."""

import getpass
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from flowrl.paths import PROJECT
from tests.support import runs

# a command that has a folder, one that goes at exit, a process, and no time to look at signals
COMMAND = """
import atexit, os, shutil, subprocess, sys, tempfile, time
from flowrl.cli import app

def command(arguments):
    later = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, later)
    with tempfile.TemporaryDirectory():
        waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        with subprocess.Popen(waiting, stdin=subprocess.PIPE):
            try:
                print("began", flush=True)
                time.sleep(60)
            except KeyboardInterrupt:
                if arguments == ["--slow"]:
                    print("cleans up", flush=True)
                    time.sleep(60)
                raise

app.command = lambda name: command
app.main(sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def plain_signals() -> Iterator[None]:
    """What this process was started to ignore, by nohup or as a job in the background of a script,
    its children would ignore too."""
    numbers = (signal.SIGHUP, signal.SIGINT)
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def began(folder: Path, *words: str, **variables: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=PROJECT, env=os.environ | {"TMPDIR": str(folder), **variables},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "began\n"
    assert len(os.listdir(folder)) == 2
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_a_command_and_what_it_began(number, tmp_path) -> None:
    with began(tmp_path, "suites") as process:
        (child,) = psutil.Process(process.pid).children()
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in said
    assert not os.listdir(tmp_path)
    child.wait(10)  # whose input has been closed


def test_the_same_signal_once_more_ends_it_at_once(tmp_path) -> None:
    with began(tmp_path, "suites", "--slow") as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None and process.stdout.readline() == "cleans up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


def test_a_launchers_process_keeps_the_signals_own_end(tmp_path) -> None:
    """It may wait in torch's own code, where no handler of Python's runs."""
    with began(tmp_path, "suites", WORLD_SIZE="2") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


def test_a_hangup_that_is_ignored_stays_so(tmp_path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        process = began(tmp_path, "suites")
    finally:
        signal.signal(signal.SIGHUP, before)
    with process:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
        process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM


COMMANDS: dict[str, tuple[str, ...]] = {
    "train": ("train", "CONFIG", "--folder", "NEW"),
    "restarts": ("train", "CONFIG", "--folder", "NEW", "--restarts", "2"),
    "resume": ("train", "--resume", "RUN", "--train.iterations", "50"),
    "sample": ("sample", "RUN", "a red ball", "--steps", "50"),
    "evaluate": ("evaluate", "RUN", "--samples", "64"),
    "vote": ("vote", "RUN", "--person", "simulated", "--port", "0", "--steps", "2"),
    "the sandbox": ("doctor", "--sandbox"),
    "a device": ("doctor", "--device", "cpu"),
    "drill": ("drill", "RUN", "--yes", "--out", "NEW"),
    "drill of two": ("drill", "RUN", "--yes", "--out", "NEW", "--processes", "2"),
    "prove": ("prove", "--model", "PIPELINE", "--no-cache"),
    "serve": ("serve-reward", "brightness", "--port", "PORT"),
}
# onnxruntime's name of a session, torch's cache
OF_LIBRARIES = {".ses", f"torchinductor_{getpass.getuser()}"}
MOMENTS = {"early": 1.0, "late": 3.0}  # of the time that the start takes


@pytest.fixture(scope="module")
def machine(pipeline, tmp_path_factory) -> dict[str, Path]:
    """A run, its file, and its model."""
    folder = tmp_path_factory.mktemp("ended")
    tree = runs.tree(pipeline, folder, runs.NFT)
    tree["train"]["iterations"], tree["evaluate"]["every"] = 2, 2
    config = runs.write(tree, folder)
    assert runs.flowrl("train", config, "--folder", folder / "run") == 0
    return {"CONFIG": config, "RUN": folder / "run", "PIPELINE": pipeline}


def seconds_to_start() -> float:
    """Of a process that imports what a training does: the machine may be busy."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import diffusers, peft, torch"], check=True)
    return time.monotonic() - began


def marked(mark: str) -> list[psutil.Process]:
    """Processes with this word in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if mark in process.environ().get("TMPDIR", ""):
                found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_of_a_real_command_is_left(name, moment, number, machine, tmp_path) -> None:
    run = runs.copied_run(machine["RUN"], tmp_path / "run")
    names = {**machine, "RUN": run, "NEW": tmp_path / "new", "PORT": runs.free_port()}
    words = [str(names.get(word, word)) for word in COMMANDS[name]]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    wait = MOMENTS[moment] * seconds_to_start()
    with open(tmp_path / "said", "w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "flowrl", *words], stdout=said, stderr=said, cwd=PROJECT,
            env=os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )  # fmt: skip
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait)
        process.send_signal(number)
        code = process.wait(120)
    text = (tmp_path / "said").read_text()
    # as a shell has it: one that comes after the interpreter's own end ends it by itself
    code = code if code >= 0 else 128 - code
    assert code in (0, 1, 128 + number, 130) and "Traceback" not in text, text[-2000:]
    psutil.wait_procs(marked(str(tmp_path)), 10)
    assert not marked(str(tmp_path)) and not {*os.listdir(temporary)} - OF_LIBRARIES
    if "drill" in name and (tmp_path / "new").exists():
        assert {path.suffix for path in (tmp_path / "new").iterdir()} <= {".html", ".json", ".txt"}
