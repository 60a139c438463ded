"""Score programs by unit tests: the share of tests that pass, or 1 if all pass and 0 otherwise.

The program is the last fenced block of the text that says it is Python; if none says so, the last
one without a language that does more than name values, as a sample of the output would. A text
without one scores 0. Its tests are in a column of the prompt file, a list of either

    Python that must run to its end, such as "assert add(2, 3) == 5"; functions `test_...`, classes
    of unittest and `check(candidate)` are called, and the module `solution` has the program's names
    {"input": text, "output": text}: its input, and what it must print before it ends with exit code
    0; trailing whitespace does not matter, and numbers with a fraction are compared as numbers

or {"inputs": [...], "outputs": [...]} of these (CodeContests: {"input": [...], "output": [...]});
with "fn_name", or with `"testtype": "functional"` in each pair, they are arguments and results of a
function or of a method of the class `Solution`, which may use Python's library without importing
it, as the judges of these data sets permit.

Programs run as Python's scripts do, in separate processes with limits on time, memory, processes,
files and output, without the run's environment variables, without network, and with read-only
access to the interpreter's files alone. That needs Linux with user namespaces (or root).
`isolation: full` refuses to start elsewhere; `isolation: best` warns, and then a program can read
the run's files, including its own tests, and native code in it can write them. `isolation:
external` runs programs and tests behind a command of the user's configuration
(`rewards.sandbox.external`). A program can always use all the time and memory that it is allowed.
Nothing of it is alive once its score is there. `flowrl doctor --sandbox` tries all this.

A program can neither print nor guess its verdict: expected outputs never enter its process. Python
tests run in a second process, which calls the program's functions. Arguments are copied and results
travel as plain data, so a test cannot pass a function of its own, catch or subclass a class of the
program, or compare its objects by their own `==`; and an argument changes in place only where the
test ignores the call's result (`rotate(a, 2)`). A sample whose tests fail since they do one of
these, or import what is not installed, is unscored, and a warning says why: it is not the program
that failed. Before a run the tests of every row are run on trivial programs that solve nothing, and
a warning names the rows that such a program passes. A row whose `reference` fails can be won by
nothing: `prompts.unwinnable` says what becomes of it.
Tests are trusted: use only tests whose code you would run.
"""

import hashlib
import json
import math
import os
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from rewards.answers.code_tests import Tests, function_name, read_tests
from rewards.answers.programs import last_program, with_library
from rewards.checks.winnable import Winnable
from rewards.configuration import configuration_file
from rewards.perception.media import expect
from rewards.rights import Right, TestColumn, WholeIsolation, need
from rewards.sandbox import run
from rewards.sandbox.external import configured
from rewards.sandbox.run import Sandbox, SandboxLimits
from rewards.types import NEEDED_COLUMN, Inline, Kind, OneOrMore, Positive, Reward, Samples, cell

SCORED_KINDS: tuple[Kind, ...] = ("text",)

LOST_PROTECTIONS = {
    "network": "it could reach the network",
    "files": "it could read and write files",
    "names": "it could see names and sizes of files",
    "disk": "its files together could fill the disk",
    "processes": "it could start any number of processes",
    "memory": "its processes together could exceed the memory limit",
}
Isolation = Literal["best", "full", "external"]
# the command would run as the user, so a run's file cannot name it
REFUSED_SETTINGS = dict.fromkeys(
    ("command", "external", "sandbox"),
    f"an external sandbox is named in your own configuration ({configuration_file()}), never in a "
    "run's file; here write isolation: external",
)
COUNTED = ("late", "without_code", "unjudged")
AUDIT_SECONDS = 20.0  # for trying the tests of all rows on programs that solve nothing
SHOWN_ROWS = 5  # rows that a warning names
MOST_REFERENCES = 3  # of one row: APPS has up to hundreds


_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def _lines(text: str) -> list[str]:
    """Lines without trailing whitespace, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same_output(printed: str, wanted: str) -> bool:
    """Whether a program printed what it should: the same lines but for trailing whitespace, where
    numbers with a fraction are compared as numbers, within 1e-5 of their size (as APPS's judge)."""
    lines, wanted_lines = _lines(printed), _lines(wanted)
    pairs = zip(lines, wanted_lines, strict=False)
    return len(lines) == len(wanted_lines) and all(a == b or _same_numbers(a, b) for a, b in pairs)


def _same_numbers(printed: str, wanted: str) -> bool:
    words, wanted_words = printed.split(), wanted.split()
    pairs = zip(words, wanted_words, strict=False)
    return len(words) == len(wanted_words) and all(a == b or _near(a, b) for a, b in pairs)


def _near(printed: str, wanted: str) -> bool:
    if not (_NUMBER.fullmatch(printed) and _NUMBER.fullmatch(wanted) and "." in printed + wanted):
        return False
    return math.isclose(float(printed), float(wanted), rel_tol=1e-5, abs_tol=1e-8)


@dataclass(frozen=True)
class TestColumns:
    """Columns of the prompt file.

    column     column with a list of tests, or its JSON text; the tests run, so take only those
               whose code you would run
    function   column that names the function of `testtype: functional` or `check(candidate)`: its
               name, code that begins it, or JSON with `func_name`; LiveCodeBench's are starter_code
               and metadata, HumanEval's is entry_point; empty: none
    reference  column with a program that wins, or a list of them, which are tried before the row is
               drawn
    """

    column: Annotated[TestColumn, NEEDED_COLUMN] = "tests"
    function: str = ""
    reference: str = "reference"


class Unreadable(str):
    """Why a row's tests cannot be read."""


class _Verdicts(NamedTuple):
    """passed  whether each test passes
    limits  what kept the judge from a verdict on some
    late    number of programs that were stopped for their time
    """

    passed: list[bool]
    limits: list[str]
    late: int


@dataclass(frozen=True)
class CodeTests:
    kind: Literal["graded", "strict"]
    columns: TestColumns
    limits: SandboxLimits
    parallel: int
    sandbox: Sandbox = run
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, samples: Samples) -> Float[Tensor, " n"]:
        expect(samples, "code_tests", "text")
        tests = self._tests(samples.meta)
        jobs = list(zip(samples.media, tests, strict=True))
        distinct = list(dict.fromkeys(jobs))
        with ThreadPoolExecutor(self.parallel) as pool:
            scores = dict(zip(distinct, pool.map(self._score, distinct), strict=True))
        return torch.tensor([scores[job] for job in jobs], dtype=torch.float64)

    def _score(self, job: tuple[str, Tests | Unreadable | None]) -> float:
        text, tests = job
        if tests is None:
            return torch.nan
        if isinstance(tests, Unreadable):
            return self._unjudged(f"its tests cannot be read: {tests}")
        code = last_program(text)
        if code is None:
            self._count("without_code")
            return 0.0
        run = self._run(code, tests)
        self._count("late", run.late)
        if run.limits:
            return self._unjudged(run.limits[0])
        share = sum(run.passed) / len(run.passed)
        return share if self.kind == "graded" else float(share == 1)

    def _unjudged(self, reason: str) -> float:
        self._count("unjudged")
        warnings.warn(
            f"code_tests: a sample is unscored, since {reason}; change the tests of its row",
            stacklevel=3,
        )
        return torch.nan

    def _run(self, code: str, tests: Tests) -> _Verdicts:
        if tests.pairs:
            return self._pairs(code, tests)
        whole = with_library(code) if tests.imports else code
        passed, late, limits = self.sandbox.run_tests(whole, tests.python, self.limits)
        return _Verdicts(passed, list(limits.values()), int(late))

    def _pairs(self, code: str, tests: Tests) -> _Verdicts:
        passed, late = list[bool](), 0
        for input_text, wanted in tests.pairs:
            outcome = self.sandbox.run_program(code, input_text, self.limits)
            late += outcome.code is None
            passed.append(outcome.code == 0 and same_output(outcome.output, wanted))
            if self.kind == "strict" and not passed[-1]:
                break
        return _Verdicts(passed, [], late)

    def _count(self, name: str, more: int = 1) -> None:
        with self._lock:
            self.counts[name] += more

    def check_prompts(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> None:
        """ValueError, naming the first row, if no row's tests can be read; warns if tests are
        weak."""
        if not any(cell(row, self.columns.column) is not None for row in meta):
            raise ValueError(self._no_column)
        tests = self._tests(meta)
        if not any(isinstance(one, Tests) for one in tests):
            row, problem = next(
                (i, one) for i, one in enumerate(tests) if isinstance(one, Unreadable)
            )
            raise ValueError(
                f"code_tests: row {row + 1} (prompt {prompts[row][:60]!r}): "
                f"{self.columns.column}: {problem}"
            )
        self._warn_of_weak(prompts, tests)

    def winnable(self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]) -> list[Winnable]:
        """Whether each row can be won: its reference passes all its tests."""
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(self._winnable, self._tried(meta)))

    def answer_keys(
        self, prompts: Sequence[str], meta: Sequence[Mapping[str, Any]]
    ) -> list[str | None]:
        """A hash of each row's tests, references and limits; None for a row without them, whose
        answer takes no program."""
        how = [self.kind, asdict(self.limits)]
        return [
            hashlib.sha256(json.dumps([how, asdict(tests), codes]).encode()).hexdigest()
            if isinstance(tests, Tests) and codes
            else None
            for tests, codes in self._tried(meta)
        ]

    def _tried(
        self, meta: Sequence[Mapping[str, Any]]
    ) -> list[tuple[Tests | Unreadable | None, list[str]]]:
        """The tests and the references of each row."""
        codes = [_references(cell(row, self.columns.reference)) for row in meta]
        return list(zip(self._tests(meta), codes, strict=True))

    def _winnable(self, job: tuple[Tests | Unreadable | None, list[str]]) -> Winnable:
        tests, codes = job
        if isinstance(tests, Unreadable):
            return Winnable("no", f"its tests cannot be read: {tests}")
        if tests is None or not codes:
            return Winnable("unknown")
        failure = ""
        for code in codes:
            run = self._run(code, tests)
            if all(run.passed):
                return Winnable("yes")
            failed = f"its reference fails test {run.passed.index(False) + 1}" + (
                "" if tests.python else " or a later one" if self.kind == "strict" else ""
            )
            failure = failure or (run.limits[0] if run.limits else failed)
        return Winnable("no", failure)

    def _warn_of_weak(
        self, prompts: Sequence[str], tests: Sequence[Tests | Unreadable | None]
    ) -> None:
        """Warn of rows whose tests pass for a program that solves nothing."""
        read = {row: one for row, one in enumerate(tests) if isinstance(one, Tests)}
        weak = {row: how for row, one in read.items() if (how := _idle_pairs(one))}
        rows = [row for row, one in read.items() if one.python]
        python = [read[row].python for row in rows]
        verdicts = self.sandbox.weak_rows(python, AUDIT_SECONDS, self.limits) if rows else []
        weak |= {row: how for row, how in zip(rows, verdicts, strict=False) if how}
        if len(verdicts) < len(rows):
            warnings.warn(
                f"code_tests: in {AUDIT_SECONDS:.0f} s, only the first {len(verdicts)} of "
                f"{len(rows)} rows could be checked with programs that solve nothing",
                stacklevel=3,
            )
        if weak:
            warnings.warn(
                f"code_tests: a program that solves nothing passes the tests of {len(weak)} of "
                f"{len(tests)} rows: {_named(weak, prompts)}; add tests that such a program fails",
                stacklevel=3,
            )

    def _tests(self, meta: Sequence[Mapping[str, Any]]) -> list[Tests | Unreadable | None]:
        """The tests of each row; None where it has none."""
        if not meta:
            raise ValueError(self._no_column)
        column, function = self.columns.column, self.columns.function
        tests: list[Tests | Unreadable | None] = []
        for columns in meta:
            value = cell(columns, column)
            try:
                name = function_name(cell(columns, function)) if function else None
                tests.append(None if value is None else read_tests(value, name))
            except (ValueError, SyntaxError, TypeError) as error:
                tests.append(Unreadable(error))
        return tests

    @property
    def _no_column(self) -> str:
        return (
            f"code_tests: no prompt has a column {self.columns.column!r}; give the prompt "
            "file one, or name another with `column`"
        )

    def report(self) -> dict[str, float]:
        """`late`: programs that were stopped for their time; `without_code`: texts without a code
        block; `unjudged`: samples whose tests this judge cannot run."""
        with self._lock:
            counts = {name: float(count) for name, count in self.counts.items()}
            self.counts.update(dict.fromkeys(self.counts, 0))
        return counts

    def examples(self) -> Samples:
        """A sum and a difference, tested as a sum."""
        texts = [f"```python\ndef f(a, b):\n    return a {sign} b\n```" for sign in "+-"]
        meta = [{self.columns.column: ["assert f(2, 3) == 5"]}] * 2
        return Samples(texts, ["Add."] * 2, torch.zeros(2, dtype=torch.long), meta)


def _named(rows: Mapping[int, str], prompts: Sequence[str]) -> str:
    """The first rows with what is said of them, and the number of the others."""
    named = sorted(rows)[:SHOWN_ROWS]
    rest = f" and {len(rows) - len(named)} more" if len(rows) > len(named) else ""
    return "; ".join(f"row {r + 1} ({prompts[r][:40]!r}): {rows[r]}" for r in named) + rest


def _references(value: Any) -> list[str]:
    """Programs that should win: code, a list of codes or its JSON text; in fences or bare."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
    codes = [value] if isinstance(value, str) else list(value or [])
    return [last_program(code) or code for code in codes if str(code).strip()][:MOST_REFERENCES]


def _idle_pairs(tests: Tests) -> str | None:
    """The program that solves nothing and still produces the expected outputs, if any."""
    if not tests.pairs:
        return None
    if all(not _lines(wanted) for _, wanted in tests.pairs):
        return "prints nothing"
    same = all(_lines(input_text) == _lines(wanted) for input_text, wanted in tests.pairs)
    return "prints its input" if same else None


def start_sandbox(limits: SandboxLimits, isolation: Isolation) -> Sandbox:
    """Start a test process. Raises ValueError, or warns, if protections are missing."""
    if os.name != "posix":
        raise ValueError("code_tests needs a POSIX system, which can limit processes")
    if isolation == "external":
        external = configured()
        external.check()
        return external
    missing = run.run_program("", "", limits).missing
    if not missing:
        return run
    holes = "; ".join(LOST_PROTECTIONS[name] for name in missing)
    if isolation == "full":
        raise ValueError(
            f"code_tests: this system cannot fully isolate a program ({holes}): permit user "
            "namespaces, run as root, use isolation: external, or accept the risk with isolation: "
            "best; `flowrl doctor --sandbox` shows each protection"
        )
    warnings.warn(
        "code_tests: this system cannot fully isolate a program, and a malicious program can "
        f"exploit that: {holes}",
        stacklevel=3,
    )
    return run


def load(
    kind: Literal["graded", "strict"] = "graded",
    columns: Inline[TestColumns] = TestColumns(),
    seconds: Positive = 5.0,
    memory: Annotated[int, Field(ge=64)] = 512,
    processes: OneOrMore = 32,
    output: OneOrMore = 4,
    parallel: OneOrMore = 4,
    isolation: Annotated[Isolation, WholeIsolation] = "full",
) -> Reward:
    """kind       graded: the share of tests that pass; strict: 1 if all pass, otherwise 0
    seconds    wall-clock time, above 0, for all Python tests of a sample, or for one input; after a
               test that hangs, the remaining ones count as failed
    memory     MB of address space per process of a program, and of their total memory, at least 64
    processes  processes and threads that a program may have, at least 1
    output     MB that a program may print or write to files, at least 1
    parallel   programs that run at the same time, at least 1; with more programs than cores, they
               run out of time
    isolation  full: refuse to start where programs cannot be isolated; best: warn, and accept that
               a program may read the run's files, its tests among them; external: programs and
               tests run behind the command of the user's configuration, which isolates them
    """
    limits = SandboxLimits(seconds, memory * 2**20, output * 2**20, processes=processes)
    tests = columns.column
    need(Right.CODE, tests, f"code_tests, which runs the tests of the column {tests},")
    if isolation != "full":
        need(Right.CODE, isolation, f"code_tests, isolation: {isolation}")
    return CodeTests(kind, columns, limits, parallel, start_sandbox(limits, isolation))
