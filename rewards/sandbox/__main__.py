"""A process for untrusted code: `python -I -S FOLDER ROLE SETTINGS`.

program  runs the code of the file `code.py` as a script
serve    runs it, then answers the requests of the judge's process
judge    runs tests, read from standard input, and writes their verdicts
audit    runs the tests of many rows against programs that solve nothing

Before any code runs, a process writes the missing protections to the file `control`; the judge and
the audit also write their results there.
"""

import json
import os
import sys
from contextlib import suppress
from typing import Any

from channel import Channel, Gone
from confine import confine
from judge import judge_tests
from program import serve_program
from weak_tests import audit_tests

# a completion may have modules of these names
OWN_MODULES = (
    "channel",
    "confine",
    "judge",
    "program",
    "remote",
    "syscalls",
    "values",
    "weak_tests",
)


def main() -> None:
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    own = sys.path.pop(0)
    assert os.path.samefile(own, os.path.dirname(os.path.abspath(__file__)))
    sys.path += settings["paths"]
    for name in OWN_MODULES:
        del sys.modules[name]
    control, channel = settings["control"], settings["channel"]
    given = _read_input(role)
    missing = confine(settings, channel)
    os.write(control, json.dumps(missing).encode() + b"\n")
    sys.argv = ["program.py"]

    def write(text: str) -> None:
        os.write(control, text.encode())

    if role == "judge":
        with suppress(Gone):  # the tests that are left did not pass
            judge_tests(Channel(*channel), given, write)
        return
    if role == "audit":
        audit_tests(given, settings["seconds"], write)
        return
    os.close(control)  # untrusted code must not write to it
    if role == "serve":
        serve_program(Channel(*channel), given)
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(given, "program.py", "exec"), space)


def _read_input(role: str) -> Any:
    """The code from the folder that the process starts in, or tests from standard input."""
    if role in ("judge", "audit"):
        return json.load(sys.stdin)
    with open("code.py", encoding="utf-8", errors="surrogatepass") as file:
        return file.read()


if __name__ == "__main__":
    main()
