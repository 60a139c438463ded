"""A process for code that nobody has read: `python -I -S FOLDER ROLE SETTINGS`.

program  runs the code of the file `code.py` as a script
serve    runs it, then does what the tests of another process ask
judge    runs tests, read from standard input, and says how they went

On the file `control` a process says, before any code runs, what could not be taken from it; the
judge says its verdicts there too.
"""

import json
import os
import sys
from contextlib import suppress
from typing import Any

from calls import Channel, Gone, judge_tests, serve_program
from confine import confine


def main() -> None:
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    own = sys.path.pop(0)
    assert os.path.samefile(own, os.path.dirname(os.path.abspath(__file__)))
    sys.path += settings["paths"]
    control, channel = settings["control"], settings["channel"]
    given = read_input(role)
    missing = confine(settings, channel)
    os.write(control, json.dumps(missing).encode() + b"\n")
    sys.argv = ["program.py"]
    if role == "judge":
        with suppress(Gone):  # the tests that are left did not pass
            judge_tests(Channel(*channel), given, lambda verdict: _say(control, verdict))
        return
    os.close(control)  # what the code says is not what we say
    if role == "serve":
        serve_program(Channel(*channel), given)
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(given, "program.py", "exec"), space)


def read_input(role: str) -> Any:
    """Code from the folder that we start in, or tests."""
    if role == "judge":
        return json.load(sys.stdin)
    with open("code.py", encoding="utf-8", errors="surrogatepass") as file:
        return file.read()


def _say(control: int, verdict: str) -> None:
    os.write(control, verdict.encode())


if __name__ == "__main__":
    main()
