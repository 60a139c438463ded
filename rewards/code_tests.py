"""Does a program do what its tests ask? The share of tests that pass, or 1 for all and 0 otherwise.

The program is the last fenced block of the text; a text without one scores 0. Its tests stand in a
column of the prompt file, a list of either

    Python that must run to its end, such as "assert add(2, 3) == 5"
    {"input": text, "output": text}: what it reads and what it must print, but for blanks at the
    ends of lines and of the whole, with exit code 0

Programs run in processes of their own: limits of time, memory, processes, files and output, no
variables of the run's, no network, and of the file system the interpreter alone, read-only. That
needs Linux with user namespaces (or root); elsewhere a warning says what is missing, a hook refuses
the same in Python, and a program that means harm can go past it: `isolation: full` refuses to start
there. What no process keeps from the machine is the time and the memory that it is allowed.

A verdict cannot be printed or guessed from inside: expected outputs never enter the process. Python
tests run in a second process, which calls the program's functions from there; arguments and results
travel as plain data. So a test cannot hand over a function of its own, catch or subclass a class of
the program, or compare its objects by their own `==`. Tests are trusted: take them from nobody
whose code you would not run.
"""

import json
import os
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rewards.perception.media import expect
from rewards.sandbox import run
from rewards.sandbox.run import SandboxLimits
from rewards.types import Reward, Samples

_FENCE = re.compile(r"^(`{3,}|~{3,})[ \t]*(\w*)[^\n]*\n(.*?)^\1[ \t]*$", re.DOTALL | re.MULTILINE)
LANGUAGES = ("", "python", "python3", "py")
ESCAPES = {
    "network": "it could reach the network",
    "files": "it could read and write files",
    "processes": "it could start processes without a bound",
}


@dataclass(frozen=True)
class Tests:
    """Of one kind: Python, or pairs of input and output."""

    python: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()


def last_program(text: str) -> str | None:
    """The last fenced block of Python; None without one, or where it is not closed."""
    found = [code for _, language, code in _FENCE.findall(text) if language.lower() in LANGUAGES]
    return found[-1] if found else None


def read_tests(given: Any) -> Tests:
    """Tests as a column may hold them. ValueError for what they cannot be."""
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        given = json.loads(given)
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping) and {"inputs", "outputs"} <= given.keys():
        both = zip(given["inputs"], given["outputs"], strict=True)
        given = [{"input": i, "output": o} for i, o in both]
    if not isinstance(given, Sequence) or not given:
        raise ValueError("tests are a list of Python, or of {input, output}, and not empty")
    if all(isinstance(test, str) for test in given):
        for test in given:
            if not test.strip():
                raise ValueError("a test is empty, so that everything would pass it")
            compile(test, "test", "exec")
        return Tests(python=tuple(given))
    if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in given):
        return Tests(pairs=tuple((str(test["input"]), str(test["output"])) for test in given))
    raise ValueError("tests are all Python, or all {input, output}")


def said(text: str) -> list[str]:
    """Lines without blanks at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


@dataclass(frozen=True)
class CodeTests:
    kind: Literal["graded", "strict"]
    column: str
    limits: SandboxLimits
    parallel: int
    counts: dict[str, int] = field(default_factory=lambda: {"late": 0, "without_code": 0})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "code_tests", "text")
        tests = self._tests(samples.prompts, samples.meta)
        jobs = list(zip(samples.media, tests, strict=True))
        unlike = list(dict.fromkeys(jobs))
        with ThreadPoolExecutor(self.parallel) as pool:
            scores = dict(zip(unlike, pool.map(self._score, unlike), strict=True))
        return torch.tensor([scores[job] for job in jobs], dtype=torch.float64)

    def _score(self, job: tuple[str, Tests | None]) -> float:
        text, tests = job
        if tests is None:
            return torch.nan
        code = last_program(text)
        if code is None:
            self._count("without_code")
            return 0.0
        passed = self._pairs(code, tests) if tests.pairs else self._python(code, tests)
        share = sum(passed) / len(passed)
        return share if self.kind == "graded" else float(share == 1)

    def _python(self, code: str, tests: Tests) -> list[bool]:
        passed, late = run.tests(code, tests.python, self.limits)
        if late:
            self._count("late")
        return passed

    def _pairs(self, code: str, tests: Tests) -> list[bool]:
        passed = []
        for given, wanted in tests.pairs:
            outcome = run.run_program(code, given, self.limits)
            if outcome.code is None:
                self._count("late")
            passed.append(outcome.code == 0 and said(outcome.said) == said(wanted))
            if self.kind == "strict" and not passed[-1]:
                break
        return passed

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError that names a row of the prompt file whose tests cannot be run."""
        if not any(row.get(self.column) is not None for row in meta):
            raise ValueError(
                f"code_tests: no prompt has a column {self.column!r}; give the prompt file one, "
                "or name another with `column`"
            )
        self._tests(prompts, meta)

    def _tests(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]
    ) -> list[Tests | None]:
        if not meta:
            self.check_prompts(prompts, meta)
        found: list[Tests | None] = []
        for row, columns in enumerate(meta):
            given = columns.get(self.column)
            try:
                found.append(None if given is None else read_tests(given))
            except (ValueError, SyntaxError) as error:
                raise ValueError(
                    f"code_tests: row {row + 1} (prompt {prompts[row][:60]!r}): {self.column}: "
                    f"{error}"
                ) from error
        return found

    def report(self) -> dict[str, float]:
        """`late`: runs that were stopped for their time; `without_code`: texts with no block."""
        with self._lock:
            found = {name: float(count) for name, count in self.counts.items()}
            self.counts.update(dict.fromkeys(self.counts, 0))
        return found

    def examples(self) -> Samples:
        """A sum and a difference, tested as a sum."""
        texts = [f"```python\ndef f(a, b):\n    return a {sign} b\n```" for sign in "+-"]
        meta = [{self.column: ["assert f(2, 3) == 5"]}] * 2
        return Samples(texts, ["Add."] * 2, torch.zeros(2, dtype=torch.long), meta)


def start_sandbox(limits: SandboxLimits, isolation: Literal["best", "full"]) -> None:
    """Start a process that does nothing, and say what could not be taken from it."""
    if os.name != "posix":
        raise ValueError("code_tests needs a POSIX system, for its limits")
    missing = run.run_program("", "", limits).missing
    if not missing:
        return
    holes = "; ".join(ESCAPES[name] for name in missing)
    if isolation == "full":
        raise ValueError(f"code_tests: this system does not shut programs in: {holes}")
    warnings.warn(
        f"code_tests: this system does not shut programs in, a hook in Python refuses what it can, "
        f"and a program that means harm can go past it: {holes}; isolation: full would refuse",
        stacklevel=3,
    )


def load(
    kind: Literal["graded", "strict"] = "graded",
    column: str = "tests",
    seconds: float = 5.0,
    memory: int = 512,
    processes: int = 32,
    output: int = 4,
    parallel: int = 4,
    isolation: Literal["best", "full"] = "best",
) -> Reward:
    """kind       the share of tests passed, or 1 only for all of them
    column     holds a list of tests; a JSON text of one will do
    seconds    by the clock, for all Python tests of a sample or for one input; a test that hangs
               ends the run, and those after it count as failed
    memory     MB of addresses of a program
    processes  and threads that it may have
    output     MB that it may print, or write to files
    parallel   programs at the same time: more than there are cores makes time run out
    isolation  full: refuse to start where programs cannot be shut in; best: warn
    """
    small = min(seconds, memory / 64, processes, output, parallel)
    if small <= 0 or memory < 64:
        raise ValueError(
            "code_tests: seconds, processes, output and parallel must be above 0, and memory at "
            f"least 64 MB; got {seconds}, {processes}, {output}, {parallel} and {memory}"
        )
    limits = SandboxLimits(seconds, memory * 2**20, output * 2**20, processes=processes)
    start_sandbox(limits, isolation)
    return CodeTests(kind, column, limits, parallel)
