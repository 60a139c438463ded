"""A process for untrusted code: `python -I -S FOLDER ROLE SETTINGS`.

program  runs the code of the file `program.py` as a script
serve    runs it, then answers the requests of the judge's process
judge    runs tests, read from standard input, and writes their verdicts
audit    runs the tests of many rows against programs that solve nothing
templates  renders chat templates as it is asked to: `templates`

Without a role it imports the sandbox's modules, for who asks why it does not start.

Before any code runs, a process writes the missing protections to the file `control`; the judge and
the audit also write their results there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from channel import Channel, Gone
from confine import PROGRAM_FILE, confine

TYPE_CHECKING = False  # typing itself takes a tenth of a program's start
if TYPE_CHECKING:
    from typing import Any

# a completion may have modules of these names
OWN_MODULES = (
    "cgroup",
    "channel",
    "confine",
    "judge",
    "keeper",
    "landlock",
    "mappings",
    "program",
    "remote",
    "syscalls",
    "template_worker",
    "values",
    "weak_tests",
)
HIGH_NUMBER = 1000  # of the file through which a program is asked


def main() -> None:
    if len(sys.argv) == 1:
        sys.exit(_tried_modules())
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    work = ROLES[role](settings)
    folder = sys.path.pop(0)
    assert os.path.samefile(folder, os.path.dirname(os.path.abspath(__file__)))
    sys.path += settings["paths"]
    for name in OWN_MODULES:
        sys.modules.pop(name, None)
    content = json.load(sys.stdin) if role in ("judge", "audit") else _code()
    missing = confine(settings, settings["channel"])
    os.write(settings["control"], json.dumps(missing).encode() + b"\n")
    sys.argv = [PROGRAM_FILE]
    work(content)


def _tried_modules() -> str:
    """Import all modules, so that a fault of one shows; otherwise say where else to look."""
    for name in OWN_MODULES:
        __import__(name)
    return (
        "All modules of the sandbox load. A process of it that does not start was stopped by the "
        "system (see dmesg and ulimit -a), or the machine is too busy to start it in time."
    )


def _code() -> bytes:
    with open(PROGRAM_FILE, "rb") as file:
        return file.read()


# Each role's modules are imported while their folder is on the path, and only for the role: the
# syntax trees of a judge cost a program as much as all the rest of its start.


def _program(settings: dict[str, Any]) -> Callable[[bytes], None]:
    from program import run_script

    def work(code: bytes) -> None:
        os.close(settings["control"])  # untrusted code must not write to it
        run_script(code, PROGRAM_FILE)

    return work


def _serve(settings: dict[str, Any]) -> Callable[[bytes], None]:
    import fcntl
    import resource

    from program import serve_program

    # to a number that no program closes which closes all files of usual numbers
    (file,) = settings["channel"]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    number = min(HIGH_NUMBER, most - 1) if most > 0 else HIGH_NUMBER
    settings["channel"] = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, number)]
    os.close(file)

    def work(code: bytes) -> None:
        os.close(settings["control"])
        serve_program(Channel(*settings["channel"]), code)

    return work


def _judge(settings: dict[str, Any]) -> Callable[[list[str]], None]:
    from judge import judge_tests

    def work(content: list[str]) -> None:
        with suppress(Gone):  # the tests that are left did not pass
            judge_tests(Channel(*settings["channel"]), content, _writer(settings))

    return work


def _audit(settings: dict[str, Any]) -> Callable[[list[list[str]]], None]:
    from weak_tests import audit_tests

    def work(rows: list[list[str]]) -> None:
        audit_tests(rows, settings["seconds"], _writer(settings))

    return work


def _templates(settings: dict[str, Any]) -> Callable[[bytes], None]:
    from template_worker import serve_templates

    sys.path += settings["paths"]  # what renders is imported before anything is confined
    from transformers.utils.chat_template_utils import render_jinja_template

    def work(_: bytes) -> None:
        os.close(settings["control"])
        serve_templates(Channel(*settings["channel"]), render_jinja_template)

    return work


def _writer(settings: dict[str, Any]) -> Callable[[str], None]:
    def write(text: str) -> None:
        os.write(settings["control"], text.encode())

    return write


ROLES = {
    "program": _program,
    "serve": _serve,
    "judge": _judge,
    "audit": _audit,
    "templates": _templates,
}

if __name__ == "__main__":
    main()
