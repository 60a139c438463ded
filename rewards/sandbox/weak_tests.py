"""Programs that solve nothing: if one of them passes a row's tests, the tests are too weak.

The programs are our own, so they run in the tests' process, hundreds of rows per process.
"""

import json
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from judge import Names, RowUnderTest
from program import Program
from remote import RemoteProgram

TEST_SECONDS = 1.0  # of all tests of a row with one program

PRELUDE = """
import itertools
try:
    import numpy
except ImportError:
    numpy = None

class Everything:
    def __getattr__(self, name): return lambda *a, **k: True
    def __contains__(self, item): return True
    def __len__(self): return 1
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __iter__(self): return itertools.count()
    def __getitem__(self, key): return self

def fails(kind):
    def function(*a, **k): raise kind("no")
    return function

def empties(result):
    def function(*a, **k):
        for one in a:
            if isinstance(one, (list, dict, set)): one.clear()
        return result
    return function
"""

NAN_TAIL = "lambda *a, **k: [*a[0][:1], float('nan')] if a and isinstance(a[0], list) else 0"
ADVERSARIES = {
    **{f"returns {value}": f"lambda *a, **k: {value}" for value in
       ("True", "False", "None", "0", "1", "''", "[]")},
    "returns NaN": "lambda *a, **k: float('nan')",
    "returns infinity": "lambda *a, **k: float('inf')",
    "returns a wide range": "lambda *a, **k: range(-1000, 1000)",
    "returns an empty array": "lambda *a, **k: numpy.array([])",
    "returns an array of NaN": "lambda *a, **k: numpy.array([float('nan')])",
    "returns the first of its argument's items, then NaN": NAN_TAIL,
    "returns its first argument": "lambda *a, **k: a[0] if a else None",
    "returns an object that agrees with everything": "lambda *a, **k: Everything()",
    "returns an endless iterator": "lambda *a, **k: itertools.count()",
    "empties its arguments and returns None": "empties(None)",
    "empties its arguments and returns []": "empties([])",
    "raises ValueError": "fails(ValueError)",
    "raises StopIteration": "fails(StopIteration)",
}  # fmt: skip


class _Direct:
    """A connection to a program in this process; messages are JSON as well."""

    def __init__(self, code: str) -> None:
        self.program = Program(code)
        self.answer: Any = None

    def send(self, message: Any) -> None:
        self.answer = self.program.answer(json.loads(json.dumps(message)))

    def receive(self) -> Any:
        return json.loads(json.dumps(self.answer))


def audit_tests(
    rows: Sequence[Sequence[str]], seconds: float, write: Callable[[str], None]
) -> None:
    """Write a line of JSON per row: a useless program that passes its tests, or null.

    Rows that are not reached within `seconds` have no line.
    """
    signal.signal(signal.SIGALRM, _late)
    end = time.monotonic() + seconds
    for tests in rows:
        if time.monotonic() > end:
            return
        write(json.dumps(_passed_by(tests)) + "\n")


def _passed_by(tests: Sequence[str]) -> str | None:
    names = Names(tests)
    for what, function in ADVERSARIES.items():
        code = PRELUDE + "".join(f"{name} = {function}\n" for name in sorted(names.completion))
        signal.setitimer(signal.ITIMER_REAL, TEST_SECONDS)
        try:
            row = RowUnderTest(tests, RemoteProgram(_Direct(code)))
            if all(row.passes(test) for test in tests):
                return what
        except TimeoutError:
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def _late(*_: object) -> None:
    raise TimeoutError
