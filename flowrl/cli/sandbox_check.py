"""`flowrl doctor --sandbox`: programs that try to leave the sandbox, on this machine's own kernel.

They run in a process of their own (`rewards.checks.try_programs`), also of another environment's
Python. What they reached is seen from here: processes that are alive, connections, files. Whatever
got out is ended.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from flowrl.cli.other_python import interpreter
from flowrl.errors import UserError
from flowrl.launching.own_python import python_environment
from rewards.catalogue.code_tests import LOST_PROTECTIONS
from rewards.checks import try_programs
from rewards.checks.escapes import ESCAPES, PROTECTION_MEANINGS, Escape, program_of
from rewards.sandbox.external import External, configured

TRIED_LIMITS = {"memory": 2**28, "written": 2**22, "files": 64, "processes": 16}
ANSWER_SECONDS = 60.0  # for one program, its start and its end
LATE_SECONDS = 15.0  # that an end may come after the time of a program
LOW_NUMBER = 300  # processes of a sandbox have lower numbers in a space of their own
LINUX_ONLY = ("privileges", "calls", "kernel", "others")
# where other files can be read, so can those of /proc
WITH_FILES = {
    "names": "it could see names and sizes of files",
    "variables": "it could read the variables of other processes in /proc",
    "others": "it could see other processes in /proc",
}
Tried = Literal["yes", "no", "impossible"]


@dataclass
class ProtectionRow:
    """One protection: how many programs tried it, and what got through it."""

    protection: str
    programs: int = 0
    through: list[str] = field(default_factory=list)
    impossible: str | None = None

    @property
    def tried(self) -> Tried:
        if self.impossible is not None:
            return "impossible"
        return "no" if self.through else "yes"

    @property
    def detail(self) -> str:
        if self.impossible is not None:
            return "; ".join([self.impossible, *self.through])
        if self.through:
            return "; ".join(self.through)
        return f"held against {self.programs} program{'s' if self.programs > 1 else ''}"


def check_sandbox(program: str | None, isolation: Literal["full", "external"]) -> int:
    """Print a table of the protections. Exit code 1 if one does not hold, or if `isolation: full`
    would refuse to start. UserError if the sandbox cannot be tried."""
    if os.name != "posix":
        raise UserError("doctor --sandbox: code_tests needs a POSIX system")
    external = _external() if isolation == "external" else None
    with _Outside() as outside, _Programs(program, outside, external) as programs:
        subject = "the external sandbox of your configuration" if external else programs.file
        print(f"{len(ESCAPES)} programs try to leave {subject}", flush=True)
        rows, missing = try_all(programs, ESCAPES)
    print_table(rows)
    held = [row.protection for row in rows if row.tried == "no"]
    if missing:
        print(f"isolation: full refuses to start here: {', '.join(missing)} cannot be isolated")
    if held:
        way = (
            "your configuration names what to bound"
            if external
            else "please report it: SECURITY.md"
        )
        print(f"not held: {', '.join(held)}; {way}")
    return int(bool(held or missing))


def _external() -> External:
    try:
        return configured()
    except ValueError as error:
        raise UserError(f"doctor --sandbox: {error}") from error


def try_all(
    programs: "_Programs", escapes: dict[str, Escape]
) -> tuple[list[ProtectionRow], list[str]]:
    """Run all escapes. Returns a row per protection, and the protections that this system lacks."""
    missing = list(programs.run("")["missing"])
    rows = {
        name: ProtectionRow(name, impossible=_lacking(name, missing))
        for name in PROTECTION_MEANINGS
    }
    for name, escape in escapes.items():
        if programs.external is not None and escape.inside:
            continue
        row = rows[escape.protection]
        row.programs += 1
        # each breach stands in its own row, whatever the program was written to try
        for protection, escaped in programs.through(escape).items():
            rows[protection].through.append(f"{name}: {escaped}")
    tried = [row for row in rows.values() if row.programs or row.impossible]
    return tried, missing


def _lacking(protection: str, missing: Sequence[str]) -> str | None:
    """Why this system cannot give a protection; None if it can."""
    if sys.platform != "linux" and protection in LINUX_ONLY:
        return "only Linux has the means"
    if protection in missing:
        return f"this system permits no namespaces: {LOST_PROTECTIONS[protection]}"
    if sys.platform == "linux" and "files" in missing and protection in WITH_FILES:
        return f"this system permits no namespaces: {WITH_FILES[protection]}"
    return None


def print_table(rows: Sequence[ProtectionRow]) -> None:
    """Print a line per protection, its meaning, and whether it held now."""
    wide = max(len(name) for name in ("protection", *(row.protection for row in rows)))
    means = max(len(PROTECTION_MEANINGS[row.protection]) for row in rows)
    print(f"{'protection':<{wide}}  {'meaning':<{means}}  tried now")
    for row in rows:
        meaning = PROTECTION_MEANINGS[row.protection]
        print(f"{row.protection:<{wide}}  {meaning:<{means}}  {row.tried}: {row.detail}")


class _Outside:
    """Things that a program must not reach: a listener, a file, a variable, a process; and a folder
    whose name marks all processes that are started here."""

    def __enter__(self) -> "_Outside":
        self.stack = ExitStack()
        enter = self.stack.enter_context
        self.canary, self.word = f"canary-{secrets.token_hex(12)}", secrets.token_hex(12)
        self.folder = Path(enter(tempfile.TemporaryDirectory(prefix="flowrl-escape-")))
        self.folder.chmod(0o777)
        self.mark = str(self.folder / "marked")
        os.mkdir(self.mark, 0o777)
        os.chmod(self.mark, 0o777)
        self.secret, self.target = self.folder / "secret", self.folder / "written"
        self.secret.write_text(self.canary)
        self.listener = enter(socket.create_server(("127.0.0.1", 0)))
        self.named = enter(socket.socket(socket.AF_UNIX))
        self.name = f"flowrl-{secrets.token_hex(8)}"
        if sys.platform == "linux":  # a name without a file
            self.named.bind(f"\0{self.name}")
            self.named.listen()
        self.listeners = [self.listener, self.named] if sys.platform == "linux" else [self.listener]
        for listener in self.listeners:
            listener.setblocking(False)
        self.process = enter(_bystander(self.canary))
        return self

    def __exit__(self, *_: object) -> None:
        self.end_marked()
        self.stack.close()

    @property
    def values(self) -> dict[str, str | int]:
        return {
            "mark": self.mark, "word": self.word, "port": self.listener.getsockname()[1],
            "socket": self.name, "secret": str(self.secret), "target": str(self.target),
            "canary": self.canary, "outer": self.process.pid,
        }  # fmt: skip

    def marked(self) -> list[psutil.Process]:
        """Processes that were started by a program or for it, and are alive."""
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if any(self.mark in word for word in process.cmdline()):
                    processes.append(process)
        return processes

    def end_marked(self) -> None:
        for process in self.marked():
            with suppress(psutil.Error):  # psutil compares its time of start first
                process.kill()

    def reached(self) -> dict[str, str]:
        """Report what was reached from within, by protection; it is as before afterwards."""
        reached: dict[str, str] = {}
        for listener in self.listeners:
            with suppress(BlockingIOError):
                listener.accept()[0].close()
                reached["network"] = "a connection arrived"
        if self.target.exists():
            self.target.unlink()
            reached["files"] = "a file was written"
        if self.process.poll() is not None:
            reached["others"] = "a process outside was ended"
        return reached


@contextmanager
def _bystander(word: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that nobody may see. Its number is not one that a small space of processes has."""
    code = "import time; time.sleep(3600)"
    process = None
    for _ in range(LOW_NUMBER):
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, word])
        if process.pid >= LOW_NUMBER:
            break
        process.kill()
        process.wait()
    assert process is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class _Programs:
    """A process of the tried environment that runs programs in its sandbox, one at a time."""

    def __init__(self, program: str | None, outside: _Outside, external: External | None) -> None:
        self.external, self.outside = external, outside
        self.python = sys.executable if program is None else interpreter(program)
        self.environment = python_environment(program is None)
        self.environment["FLOWRL_CANARY"] = outside.canary

    def __enter__(self) -> "_Programs":
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [self.python, "-P", try_programs.__file__], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.errors, text=True, env=self.environment,
        )  # fmt: skip
        self.file = self._asked(self.outside.mark)["file"]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()

    def run(self, code: str, tests: Sequence[str] = (), seconds: float = 1.0) -> dict[str, Any]:
        """The result of a program, as `rewards.checks.try_programs` writes it."""
        command = list(self.external.command) if self.external else None
        limits = {**TRIED_LIMITS, "seconds": seconds}
        return self._asked({"code": code, "tests": tests, "limits": limits, "external": command})

    def _asked(self, question: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        timer = threading.Timer(ANSWER_SECONDS, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:  # it has ended
            line = ""
        finally:
            timer.cancel()
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise UserError(
                f"doctor --sandbox: {self.python} cannot run the sandbox: {answer['error']}"
            )
        return answer

    def _last_words(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        return f"it ended with {code}: {self.errors.read()[-500:].strip()}"

    def through(self, escape: Escape) -> dict[str, str]:
        """Run an escape. Returns what it got through, by protection."""
        code = program_of(escape, self.outside.values)
        result = self.run(code, escape.tests, escape.seconds)
        through: dict[str, str] = {}
        if left := self.outside.marked():
            through["end"] = f"{len(left)} processes were alive after the verdict"
            self.outside.end_marked()
        if result["seconds"] > escape.seconds + LATE_SECONDS:
            through["time"] = f"it ended after {result['seconds']:.0f} s"
        if escape.tests and result["passed"]:
            through["verdict"] = f"{result['passed']} of {len(escape.tests)} tests passed"
        said = [line for line in result.get("output", "").splitlines() if self.outside.word in line]
        if said:
            words = (line.partition(self.outside.word)[2].strip() for line in said)
            through[escape.protection] = ", ".join(words)
        return {**self.outside.reached(), **through}
