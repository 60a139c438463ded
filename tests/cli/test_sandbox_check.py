"""`flowrl doctor --sandbox`: programs succeed where nothing holds them; a sandbox with a hole is
named, and so is one that this system cannot give."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flowrl.api import commands
from flowrl.cli import sandbox_check
from flowrl.cli.sandbox_check import ProtectionRow, _Outside, print_table, try_all
from flowrl.errors import UserError
from flowrl.paths import PROJECT
from rewards.catalogue.code_tests import LOST_PROTECTIONS
from rewards.checks import escapes
from rewards.checks.escapes import ESCAPES, PROTECTION_MEANINGS, program_of
from tests.rewards.test_rewards_code import ISOLATED

linux = pytest.mark.skipif(sys.platform != "linux", reason="they use calls of Linux")
isolated = pytest.mark.skipif(not ISOLATED, reason="no namespaces are permitted here")
FEW = {name: ESCAPES[name] for name in ("two forks", "its variables", "prints a verdict")}
# what only a space of its own, another kernel or another user of the machine would permit
NEVER_ALONE = {
    "the interpreter's libraries",  # of a user who does not own them
    "calls of another word size",
    "calls of newer kernels",
    "calls that reach the kernel's inside",
    "other families of sockets",
    "a user of its own",
    "a network of its own made real",
    "another root",
    "a file by its number",
    "more rights",
    "asynchronous input",
    "memory of one process",
    "memory of several processes",
    "memory of processes without a first thread",
}
ALONE = [
    name
    for name, escape in ESCAPES.items()
    if not escape.alone and not escape.tests and name not in NEVER_ALONE
]


def test_every_program_can_be_compiled_and_each_protection_is_tried() -> None:
    values = dict.fromkeys(
        ("mark", "word", "socket", "secret", "target", "canary"), "x"
    ) | {"port": 1, "outer": 1}  # fmt: skip
    for name, escape in ESCAPES.items():
        compile(program_of(escape, values), name, "exec")
    assert {escape.protection for escape in ESCAPES.values()} == set(PROTECTION_MEANINGS)


@linux
@pytest.mark.parametrize(
    "name", [n if n == "a file by its path" else pytest.param(n, marks=pytest.mark.slow)
             for n in ALONE],
)  # fmt: skip
def test_without_a_sandbox_a_program_succeeds(name, tmp_path, monkeypatch) -> None:
    """Otherwise it would be held by its own mistakes."""
    monkeypatch.setattr(escapes, "ESCAPE_SECONDS", 3)
    said = tmp_path / "said"  # a file, since what it leaves behind would hold a pipe open
    with _Outside() as outside, open(said, "w") as file:
        code = program_of(ESCAPES[name], outside.values)
        environment = {**os.environ, "FLOWRL_CANARY": outside.canary}
        process = subprocess.Popen(
            [sys.executable, "-c", code, outside.mark], stdout=file, stderr=subprocess.STDOUT,
            env=environment, cwd=tmp_path,
        )  # fmt: skip
        until = time.monotonic() + (1 if ESCAPES[name].waits else 30)
        while process.poll() is None and outside.word not in said.read_text():
            time.sleep(0.05)
            if time.monotonic() > until:  # its time is over, and it lives
                break
        left = outside.marked()
        assert left or outside.word in said.read_text() or outside.reached(), said.read_text()
        process.kill()
        process.wait()


@isolated
@pytest.mark.slow
def test_a_whole_sandbox_holds(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sandbox_check, "ESCAPES", FEW)
    assert commands.doctor_command(["--sandbox"]) == 0
    said = capsys.readouterr().out
    assert str(PROJECT / "rewards/sandbox/run.py") in said
    assert said.count("yes: held against 1 program\n") == 3


@isolated
@pytest.mark.slow
def test_all_programs_are_held(capsys) -> None:
    assert commands.doctor_command(["--sandbox"]) == 0
    said = capsys.readouterr().out
    assert said.count(" yes: held") == len(PROTECTION_MEANINGS)


def environment_with(tmp_path: Path, file: str, old: str, new: str) -> str:
    """The Python of an environment whose sandbox has a hole."""
    shutil.copytree(PROJECT / "rewards", tmp_path / "rewards")
    path = tmp_path / "rewards/sandbox" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@isolated
@pytest.mark.parametrize("hole", [
    ("run.py", "env=ENVIRONMENT", "env={**ENVIRONMENT, **os.environ}",
     "no: its variables: in its own"),
    pytest.param(("run.py", "stderr=subprocess.DEVNULL, cwd", "stderr=None, bad=1, cwd",
                  "cannot run the sandbox"), marks=pytest.mark.slow),
])  # fmt: skip
def test_a_sandbox_with_a_hole_is_named(hole, tmp_path, monkeypatch, capsys) -> None:
    file, old, new, said = hole
    monkeypatch.setattr(sandbox_check, "ESCAPES", FEW)
    python = environment_with(tmp_path, file, old, new)
    if said == "cannot run the sandbox":
        with pytest.raises(UserError, match=said):
            commands.doctor_command(["--sandbox", "--program", python])
        return
    assert commands.doctor_command(["--sandbox", "--program", python]) == 1
    assert said in capsys.readouterr().out


@linux
@pytest.mark.slow
def test_without_namespaces_full_would_refuse(tmp_path, monkeypatch, capsys) -> None:
    shut = "libc.unshare(flags) == 0", "False"
    python = environment_with(tmp_path, "confine.py", *shut)
    path = tmp_path / "rewards/sandbox/confine.py"
    path.write_text(path.read_text().replace("libc.unshare(flags | USERS) != 0", "True"))
    monkeypatch.setattr(sandbox_check, "ESCAPES", FEW)
    assert commands.doctor_command(["--sandbox", "--program", python]) == 1
    said = capsys.readouterr().out
    refuses = "isolation: full refuses to start here:"
    lost = "names" if f"{refuses} names," in said else "files"
    assert f"{refuses} {lost}, disk cannot be isolated" in said
    for each in (lost, "disk"):  # a kernel with Landlock still isolates contents
        row = f"impossible: this system permits no namespaces: {LOST_PROTECTIONS[each]}"
        assert row in said


class LosesFiles:
    """A sandbox that mounts nothing, as in gVisor: all files can be read, /proc too."""

    external = None

    def run(self, code: str) -> dict[str, list[str]]:
        return {"missing": ["files", "disk"]}

    def through(self, escape: escapes.Escape) -> dict[str, str]:
        return {escape.protection: "seen"}


@linux
def test_what_rests_on_files_is_no_hole_where_files_can_be_read(capsys) -> None:
    kinds = ("files", "names", "variables", "others", "network")
    tried = {kind: next(e for e in ESCAPES.values() if e.protection == kind) for kind in kinds}
    rows, _ = try_all(LosesFiles(), tried)
    assert [row.tried for row in rows if row.protection in kinds] == [
        "no" if row.protection == "network" else "impossible"
        for row in rows if row.protection in kinds
    ]  # fmt: skip
    print_table(rows)
    assert "variables of other processes in /proc; variables: seen" in capsys.readouterr().out


MACOS_LACKS = ["network", "files", "disk", "processes", "memory"]


def test_on_macos_what_only_linux_has_is_impossible(monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    class Macos:
        external = None

        def run(self, code: str) -> dict[str, list[str]]:
            return {"missing": MACOS_LACKS}

        def through(self, escape: escapes.Escape) -> dict[str, str]:
            return {}

    rows, missing = try_all(Macos(), FEW)
    states = {row.protection: row.tried for row in rows}
    assert {name for name, state in states.items() if state == "impossible"} == {
        *MACOS_LACKS, "privileges", "calls", "kernel", "others",
    }  # fmt: skip
    assert states["end"] == states["variables"] == states["verdict"] == "yes"
    assert missing == MACOS_LACKS


def test_the_table_tells_what_got_through(capsys) -> None:
    rows = [
        ProtectionRow("end", 3, ["two forks: 2 processes were alive"]),
        ProtectionRow("files", 2),
    ]
    print_table(rows)
    said = capsys.readouterr().out.splitlines()
    assert said[1].endswith("no: two forks: 2 processes were alive")
    assert said[2].endswith("yes: held against 2 programs")


def test_no_interpreter_is_a_sentence() -> None:
    with pytest.raises(UserError, match="no interpreter"):
        commands.doctor_command(["--sandbox", "--program", "/nowhere"])
    with pytest.raises(UserError, match="--program needs --sandbox"):
        commands.doctor_command(["--program", sys.executable])
