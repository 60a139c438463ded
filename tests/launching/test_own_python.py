"""No process that we start imports what lies in the working folder, in which anybody may have put a
`torch.py` or a `flowrl`, and none leaves a temporary folder."""

import ast
import getpass
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl.api import run as api_run
from flowrl.cli import device_check, sandbox_check
from flowrl.drill import faults
from flowrl.drill.training import DrilledProgram
from flowrl.launching.job import LaunchJob
from flowrl.launching.own_python import python_environment
from flowrl.paths import PROJECT
from flowrl.run.workers.head import LastWords
from rewards.sandbox import run as sandbox
from rewards.sandbox import templates
from rewards.sandbox.external import External
from rewards.serving.workers import Worker
from tests.test_house import PACKAGES, modules

STARTING = {  # functions that start a program, by how they begin
    "subprocess": ("run", "Popen", "call", "check_", "getoutput", "getstatusoutput"),
    "os": ("system", "popen", "exec", "spawn", "posix_spawn"),
    "asyncio": ("create_subprocess",),
    "multiprocessing": ("",),
}

# every place that starts a program, and how often; those that start Python are in STARTS below
PLACES = {
    "flowrl/api/run.py": 1,
    "flowrl/cli/device_check.py": 1,
    "flowrl/cli/sandbox_check.py": 2,
    "flowrl/drill/faults.py": 2,  # one of them within the script that it starts
    "flowrl/drill/training.py": 1,
    "flowrl/launching/accelerate.py": 1,  # these start what `LaunchJob.command` says
    "flowrl/launching/on_ray.py": 1,
    "flowrl/launching/slurm.py": 1,  # sbatch
    "flowrl/media/fonts.py": 1,  # fc-match
    "flowrl/run/workers/head.py": 1,
    "flowrl/session/notices.py": 1,  # the command of the user's configuration
    "rewards/sandbox/external.py": 2,
    "rewards/sandbox/run.py": 1,
    "rewards/serving/workers.py": 1,
}


def starts_in(text: str) -> Iterator[str]:
    """The calls in a module that start a program, and those in texts of it that are modules."""
    if not any(f"{owner}." in text for owner in STARTING):
        return  # most modules, which then need not be parsed
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name):
                if node.func.attr.startswith(STARTING.get(owner.id, ())):
                    yield f"{owner.id}.{node.func.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if "\nimport " in node.value and "subprocess.run(" in node.value:
                yield from starts_in(node.value)


def test_every_place_that_starts_a_program_is_known() -> None:
    found = Counter[str]()
    for path in modules():
        name = str(path.relative_to(PROJECT))
        if name != "rewards/checks/escapes.py":  # programs that are to be held
            found[name] += len(list(starts_in(path.read_text())))
    assert +found == PLACES, "add the place here, and to STARTS if it starts Python"
    assert set(PACKAGES) >= {name.partition("/")[0] for name in PLACES}


@pytest.fixture
def strange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with modules that note that they were imported."""
    folder = tmp_path / "elsewhere"
    names = (
        "torch",
        "json",
        "yaml",
        "sympy",
        "transformers",
        "rewards",
        "accelerate",
        "shutil",
        "socket",
    )
    note = f"open({str(tmp_path / 'imported')!r}, 'a').write(__name__ + ' ')\n"
    (folder / "flowrl").mkdir(parents=True)
    for name in (*names, "flowrl/__init__", "flowrl/__main__"):
        (folder / f"{name}.py").write_text(note)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return folder


class Started(Exception):
    """The command of a start, which is tried without its own work."""


def command_of(start: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Any]:
    """The words and variables with which something calls `subprocess.run`."""

    def catch(words: list[str], env: Any = None, **_: Any) -> None:
        raise Started(words, env)

    with monkeypatch.context() as patch, pytest.raises(Started) as caught:
        patch.setattr(subprocess, "run", catch)
        start()
    words, env = caught.value.args
    return words, env


def tried(words: list[str], environment: Any) -> str:
    """What `-m flowrl --version` says in place of `-m flowrl train ...`."""
    words = [*words[: words.index("flowrl") + 1], "--version"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def restarted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    run = flowrl.Run("demo")
    return tried(*command_of(lambda: run.train(restarts=1, folder=folder / "run"), monkeypatch))


def sharded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    config = "configs/accelerate/ddp_cpu_2.yaml"
    start = lambda: device_check.sharded(config, "cpu", folder)
    assert api_run.subprocess is device_check.subprocess
    return tried(*command_of(start, monkeypatch))


def drilled(processes: int, restarts: int = 0) -> str:
    program = DrilledProgram(sys.executable, True, Path("state"), processes)
    return tried(program.command([], restarts), program.environment())


def filled(folder: Path) -> str:
    """The script that makes a disk, as far as its imports."""
    environment = DrilledProgram(sys.executable, True, folder / "state").environment()
    script = faults.DISK_SCRIPT.partition("source, place")[0]
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    return str(done.returncode)


def launched(folder: Path, gpus: int) -> str:
    """A machine's command, whose launcher starts Python as accelerate's does."""
    for name, text in (
        ("accelerate", f"exec {sys.executable} -m flowrl --version"),
        ("flowrl", f"exec {sys.executable} -P {folder.parent / 'program.py'} --version"),
    ):
        (folder.parent / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder.parent / name).chmod(0o755)
    (folder.parent / "program.py").write_text("from flowrl.cli import main\nmain()\n")
    command = LaunchJob("demo", "runs/x", gpus=gpus).command()
    path = f"{folder.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"exec {command}"], check=True, capture_output=True, text=True,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(PROJECT)},
    )  # fmt: skip
    return done.stdout


def sandboxed() -> str:
    limits = sandbox.SandboxLimits()
    assert sandbox.run_tests("def f(x): return x", ["assert f(1) == 1"], limits).passed == [True]
    assert sandbox.weak_rows([["assert f(2) == 3"]], 5.0, limits) == [None]
    return sandbox.run_program("import json; print(json.dumps(1))", "", limits).output


def rendered() -> str:
    asked = {"template": "{{ 1 }}", "messages": [], "further": {}}
    renderer = templates._Renderer()
    try:
        return renderer.render(asked)
    finally:
        renderer.close()


def answered(folder: Path) -> str:
    script = folder.parent / "worker.py"
    script.write_text("import json\nprint(1, flush=True)\nprint(json.dumps(int(input())))\n")
    worker = Worker(script)
    try:
        return str(worker.ask(1, 60))
    finally:
        worker.stop()


def watched_bystander() -> str:
    with sandbox_check._bystander("word") as process:
        return str(process.poll())


def escaping() -> str:
    with (
        sandbox_check._Outside() as outside,
        sandbox_check._Programs(None, outside, None) as programs,
    ):
        return programs.run("print(1)")["output"]


def last_words() -> str:
    words = LastWords("127.0.0.1", 9, "the head has ended")
    words.close()
    return str(words._process.returncode)


STARTS: dict[str, Callable[[Path, pytest.MonkeyPatch], str]] = {
    "restarts from Python": restarted,
    "doctor --device on two processes": sharded,
    "a drill": lambda folder, _: drilled(1, restarts=2),
    "a drill under torchrun": lambda folder, _: drilled(2),
    "a drill's disk": lambda folder, _: filled(folder),
    "launch, several processes": lambda folder, _: launched(folder, 2),
    "launch, one process": lambda folder, _: launched(folder, 1),
    "the sandbox": lambda *_: sandboxed(),
    "templates": lambda *_: rendered(),
    "an external sandbox": lambda *_: str(External((sys.executable,)).check()),
    "a process beside Ray's head": lambda *_: last_words(),
    "a reward's worker": lambda folder, _: answered(folder),
    "doctor --sandbox": lambda *_: escaping(),
    "doctor --sandbox, a process beside": lambda *_: watched_bystander(),
}
# onnxruntime's name of a session, torch's cache of compiled code
OF_LIBRARIES = (".ses", f"torchinductor_{getpass.getuser()}")
SLOW = ("a drill under torchrun", "doctor --device on two processes", "templates")


@pytest.mark.parametrize(
    "start", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in STARTS]
)
def test_what_lies_in_the_working_folder_is_not_imported(start, strange, monkeypatch) -> None:
    assert STARTS[start](strange, monkeypatch)
    noted = strange.parent / "imported"
    assert not noted.exists(), noted.read_text()
    left = [path.name for path in (strange.parent / "temporary").iterdir()]
    assert not [name for name in left if name not in OF_LIBRARIES]


def test_such_a_folder_is_imported_from_without_the_variable(strange) -> None:
    """So the tests above can fail."""
    words = [sys.executable, "-m", "flowrl", "--version"]
    subprocess.run(words, env=os.environ | {"PYTHONPATH": str(PROJECT)}, check=True)
    assert "flowrl" in (strange.parent / "imported").read_text()
    (strange.parent / "imported").unlink()
    subprocess.run(words, env=python_environment(), check=True)
    assert not (strange.parent / "imported").exists()


def test_an_installed_flowrl_adds_nothing_to_the_path(monkeypatch) -> None:
    """The folder of packages, put before the standard library, could hide parts of it."""
    monkeypatch.setattr("flowrl.launching.own_python.PROJECT", Path("/x/site-packages"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "PYTHONPATH" not in python_environment()
