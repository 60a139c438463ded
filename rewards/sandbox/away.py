"""Roles of a process in a sandbox of the user's own: see `external`. Runs in that sandbox."""

import atexit
import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from channel import Channel, Gone
from judge import judge_tests
from program import run_script, serve_program
from weak_tests import audit_tests

AWAY_FILE = "program.py"
ASKED, WRITTEN = b"q", b"v"  # kinds of frames, as in `external`


class Asking(Channel):
    """The judge's connection to the program, through the run's process."""

    def send(self, message: Any) -> None:
        os.write(self.out, ASKED)
        super().send(message)


def work(settings: dict[str, Any], content: str) -> None:
    """Carry out a role. The program's own input and output are 0 and 1; of the other roles these
    are the run's alone."""
    role, ready = settings["role"], f"{settings['word']}\n".encode()
    sys.argv = [AWAY_FILE]
    _enter_own_folder()
    if role == "program":
        os.write(1, ready)
        _read_all_input()
        _limit(settings)
        run_script(content.encode("utf-8", "surrogatepass"), AWAY_FILE)
        return
    _limit(settings)
    into, out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    os.write(out, ready)
    if role == "serve":
        serve_program(Channel(into, out), content.encode("utf-8", "surrogatepass"))
    elif role == "judge":
        with suppress(Gone):  # the tests that are left did not pass
            judge_tests(Asking(into, out), json.loads(content), _writer(out))
    else:
        audit_tests(json.loads(content), settings["seconds"] - 1, _writer(out))


def _enter_own_folder() -> None:
    """Enter a new folder, which goes with this process and not with a child of it."""
    folder, owner = tempfile.mkdtemp(prefix="flowrl-away-"), os.getpid()
    os.chdir(folder)
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))


def _read_all_input() -> None:
    """Replace the pipe of standard input by a file of what comes through it, which a program may
    map or read again. Its size is bounded by the run's process, not by the program's limits."""
    linux = sys.platform == "linux"  # there it needs no room on a disk, which may be small
    with os.fdopen(os.memfd_create("input"), "w+b") if linux else tempfile.TemporaryFile() as file:
        while part := os.read(0, 2**16):
            file.write(part)
        file.seek(0)
        os.dup2(file.fileno(), 0)


def _writer(out: int) -> Callable[[str], None]:
    def write(text: str) -> None:
        body = text.encode()
        os.write(out, WRITTEN + len(body).to_bytes(4, "little") + body)

    return write


def _limit(settings: dict[str, Any]) -> None:
    """Limits of one process; those of all together are the sandbox's own."""
    limits = {
        resource.RLIMIT_AS: settings["memory"],
        resource.RLIMIT_CPU: int(settings["seconds"]) + 1,
        resource.RLIMIT_FSIZE: settings["written"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with suppress(ValueError, OSError):  # gVisor keeps none of some kinds
            resource.setrlimit(kind, (most, most))
