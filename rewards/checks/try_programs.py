"""Run programs in the sandbox of the environment whose Python runs this script:
`python -P try_programs.py`.

It imports that environment's `rewards.sandbox` and nothing else, so it can try another version of
it. The first line of standard input names the folder for temporary files, each further line is a
job of JSON; each line of standard output is a result.
"""

import json
import sys
import tempfile
import time
import warnings
from typing import Any


def main() -> None:
    tempfile.tempdir = json.loads(sys.stdin.readline())
    from rewards.sandbox import run

    _answer({"file": run.__file__})
    for line in sys.stdin:
        try:
            _answer(_done(run, json.loads(line)))
        except (RuntimeError, OSError) as error:  # the sandbox does not start
            _answer({"error": str(error)})


def _done(run: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The result of a job: its output, or how many of its tests passed."""
    limits = run.SandboxLimits(**job["limits"])
    if job["external"]:
        from rewards.sandbox.external import External

        run = External(tuple(job["external"]))
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if job["tests"]:
            outcome = {"passed": sum(run.run_tests(job["code"], job["tests"], limits)[0])}
        else:
            result = run.run_program(job["code"], "", limits)
            outcome = {"output": result.output, "missing": list(result.missing)}
    said = [str(warning.message) for warning in warned]
    return {**outcome, "seconds": time.monotonic() - began, "warned": said}


def _answer(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
