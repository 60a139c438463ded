"""Programs that solve nothing: if one of them passes a row's tests, the tests are too weak.

The programs are our own, so they run in the tests' process, hundreds of rows per process.
"""

import ast
import json
import math
import os
import signal
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from judge import Names, RowUnderTest
from program import Program
from remote import RemoteProgram

TEST_SECONDS = 1.0  # of all tests of a row with one program
APART_SECONDS = 0.2  # the same, of the one that is a process
ENDLESS = "lambda *a, **k: range(-10**18, 10**18)"
MOST_NUMBERS = 10**6  # a search for a text in more numbers than these takes too long
MOST_DIGITS, MOST_LETTERS = 5, 4  # of the texts of all numbers and words: below 3 MB
NO_ANSWER = "\0"
EVERYTHING = {
    "a list": "{0}", "a tuple": "tuple({0})", "a set": "hashable({0})",
    "a dictionary": "dict.fromkeys(hashable({0}), True)", "lists": "[{0}] * 9",
    "a dictionary of lists": "dict.fromkeys(hashable({0}), {0})",
    "one text": "' '.join(map(str, {0}))", "texts": "[str(one) for one in {0}]",
}  # fmt: skip


PRELUDE = """
import itertools, string
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

def hashable(values):
    found = set()
    for one in values:
        try: found.add(one)
        except TypeError: pass
    return found

def words(n): return ' '.join(map(''.join, itertools.product(string.ascii_letters[:26], repeat=n)))

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


def containers_of(tests: Sequence[str]) -> dict[str, str]:
    """Programs that return many values at once, for tests that ask for membership: `3 in f(2)`.

    They return all literals of the tests, in each kind of container, with one more value, since a
    test may ask for exactly its own; all numbers and all words as long as the tests' own, as one
    text; and all whole numbers between bounds ten times as wide as the tests' own, and more.
    """
    literals, whole, texts = _literals(tests)
    several = f"[{', '.join([*sorted(literals), repr(NO_ANSWER)])}]"
    functions = {f"returns {kind} of all values in its tests": form.format(several)
             for kind, form in EVERYTHING.items()}  # fmt: skip
    bound = min(10 * max((abs(number) for number in whole), default=1), MOST_NUMBERS)
    functions[f"returns the numbers from {-bound} to {bound}"] = f"range({-bound}, {bound} + 1)"
    for length in sorted({len(str(abs(number))) for number in whole}):
        if length <= MOST_DIGITS:
            numbers = f"range({10 ** (length - 1)}, {10**length})"
            functions[f"returns all numbers of {length} digits as one text"] = (
                f"' '.join(map(str, {numbers}))"
            )
    for length in sorted({len(text) for text in texts if text.isalpha()}):
        if length <= MOST_LETTERS:
            functions[f"returns all words of {length} letters as one text"] = f"words({length})"
    return {description: f"lambda *a, **k: {result}" for description, result in functions.items()}


def _literals(tests: Sequence[str]) -> tuple[set[str], set[int], set[str]]:
    """The literals of all tests as source, with containers of literals, and negative numbers beside
    positive ones; the whole numbers among them; the texts, and those inside texts' digits too."""
    numbers: set[str] = set()
    whole: set[int] = set()
    texts: set[str] = set()
    for value in (value for test in tests for value in _values(test)):
        if isinstance(value, float) and not math.isfinite(value):
            continue  # these have no literals
        numbers.add(repr(value))
        if type(value) is str:
            texts.add(value)
            whole |= {int(value)} if value.isdecimal() and len(value) <= MOST_DIGITS else set()
        if type(value) is int:
            whole.add(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers.add(repr(-value))
    return numbers, whole, texts


def _values(test: str) -> Iterator[Any]:
    """Constants of a test and containers of constants, as written and as Python computes them."""
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.Constant | ast.Tuple | ast.List | ast.Set | ast.Dict):
            with suppress(ValueError, TypeError):  # it has a name inside
                yield ast.literal_eval(node)
    codes = [compile(test, "test", "exec")]
    while codes:
        for value in codes.pop().co_consts:
            if isinstance(value, types.CodeType):
                codes.append(value)
            elif isinstance(value, int | float | str | bytes):
                yield value


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

    def passes_all(function: str) -> bool:
        code = PRELUDE + "".join(f"{name} = {function}\n" for name in sorted(names.completion))
        row = RowUnderTest(tests, RemoteProgram(_Direct(code)))
        return all(row.passes(test) for test in tests)

    for description, function in {**ADVERSARIES, **containers_of(tests)}.items():
        signal.setitimer(signal.ITIMER_REAL, TEST_SECONDS)
        try:
            if passes_all(function):
                return description
        except TimeoutError:
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return "returns all numbers" if _passes_apart(lambda: passes_all(ENDLESS)) else None


def _passes_apart(passes: Callable[[], bool]) -> bool:
    """In a process that the kernel ends: a search through all numbers handles no signal. False if
    no process can be started."""
    try:
        child = os.fork()
    except OSError:
        return False
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, APART_SECONDS)
        os._exit(0 if passes() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _late(*_: object) -> None:
    raise TimeoutError
