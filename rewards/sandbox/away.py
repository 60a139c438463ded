"""Roles of a process in a sandbox of the user's own: see `external`. Runs in that sandbox."""

import json
import os
import resource
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
    _limit(settings)
    os.chdir(tempfile.mkdtemp())
    role, ready = settings["role"], f"{settings['word']}\n".encode()
    if role == "program":
        os.write(1, ready)
        run_script(content.encode("utf-8", "surrogatepass"), AWAY_FILE)
        return
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
