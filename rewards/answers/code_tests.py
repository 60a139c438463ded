"""Tests of programs in the forms of data sets.

Python                     `test_list` of MBPP; texts of pytest functions, which import what they
                           test from `solution` (KodCode): the judge has such a module
                           `check(candidate)` of HumanEval and LeetCodeDataset, whose function a
                           column names; classes of unittest (BigCodeBench)
{input, output}            pairs; LiveCodeBench's with `testtype`; lists of CodeContests
{inputs, outputs}          APPS, TACO and verl's copies of them; with `fn_name`, arguments and
                           results of a function
"""

import ast
import base64
import binascii
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_PACKED = re.compile(r"e[A-Za-z0-9+/\s]{16,}={0,2}\s*")  # base64 of zlib's first byte, 0x78
_MOST_BYTES = 2**28  # of tests, unpacked


@dataclass(frozen=True)
class Tests:
    """The tests of a row, all of one kind: Python, or pairs of input and output.

    imports  whether a program may use names of Python's library without importing them, as those
             data sets' own judges permit whose starters name types such as List
    """

    python: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    imports: bool = False


def read_tests(value: Any, function: str | None = None) -> Tests:
    """Read the tests from a cell. `function`: the one that pairs of arguments and a result are
    about, where the tests do not name it. ValueError if the cell has no tests or another form."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        value = _loaded(value)
    if isinstance(value, str) and _PACKED.fullmatch(value):
        value = json.loads(_unpacked(value))
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= value.keys():
        return _columns(value)
    if isinstance(value, Mapping) and {"input", "output"} <= value.keys():
        lists = all(isinstance(value[name], list | tuple) for name in ("input", "output"))
        return (
            _columns({f"{name}s": value[name] for name in value})
            if lists
            else _pairs([value], function)
        )
    if not isinstance(value, Sequence) or not value:
        raise ValueError("tests must be a non-empty list of Python code or of {input, output}")
    if all(isinstance(test, str) for test in value):
        python = tuple(_of_python(test, function) for test in value)
        if all(_only_defines(test) for test in python):
            raise ValueError(
                "the tests define functions or classes and call none, so every program would pass"
            )
        return Tests(python=python, imports="Solution()" in "".join(python))
    if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in value):
        return _pairs(value, function)
    raise ValueError("tests must be all Python, or all {input, output}")


class _Texts(pickle.Unpickler):
    """Reads pickles of plain data alone: anything else could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"the packed tests hold {module}.{name}, not a text")


def _unpacked(text: str) -> str:
    """The JSON in LiveCodeBench's `private_test_cases`: base64 of a compressed pickle of a text."""
    try:
        packed = zlib.decompressobj()
        data = packed.decompress(base64.b64decode(text), _MOST_BYTES)
        if packed.unconsumed_tail:
            raise ValueError(f"the packed tests have more than {_MOST_BYTES // 2**20} MiB")
        content = _Texts(io.BytesIO(data)).load()
    except (zlib.error, binascii.Error, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"the packed tests are damaged: {error}") from error
    return str(content)


def _loaded(text: str) -> Any:
    """JSON, or Python that begins with a bracket as JSON does."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        try:
            compile(text, "test", "exec")
        except (SyntaxError, ValueError):
            raise ValueError(f"it is neither JSON ({error}) nor Python") from error
        return text


def _columns(columns: Mapping[str, Any]) -> Tests:
    inputs, outputs = columns["inputs"], columns["outputs"]
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    if not inputs:
        raise ValueError("inputs and outputs are empty, so every program would pass")
    name = columns.get("fn_name") or columns.get("func_name")
    if name is None:
        return Tests(
            pairs=tuple((_text(i), _text(o)) for i, o in zip(inputs, outputs, strict=True))
        )
    calls = zip(inputs, outputs, strict=True)
    python = tuple(_call(str(name), _arguments(i), o, True) for i, o in calls)
    return Tests(python=python, imports=True)


def _pairs(pairs: Sequence[Mapping[str, Any]], function: str | None) -> Tests:
    kinds = {str(test.get("testtype") or "stdin") for test in pairs}
    if kinds == {"stdin"}:
        return Tests(pairs=tuple((_text(test["input"]), _text(test["output"])) for test in pairs))
    if kinds != {"functional"}:
        raise ValueError(f"testtype must be stdin or functional for all, not {sorted(kinds)}")
    if not function:
        raise ValueError(
            "testtype is functional, but nothing names the function to call: name the column that "
            "has it with `function` (LiveCodeBench: metadata or starter_code)"
        )
    python = []
    for test in pairs:
        lines = [line for line in str(test["input"]).split("\n") if line.strip()]
        arguments, wanted = [json.loads(line) for line in lines], json.loads(str(test["output"]))
        python.append(_call(function, arguments, wanted, False))
    return Tests(python=tuple(python), imports=True)


def _text(value: Any) -> str:
    """Input or output as one text: some rows list its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _arguments(arguments: Any) -> list[Any]:
    if not isinstance(arguments, list | tuple):
        raise ValueError(f"inputs of a function must be lists of arguments, not {arguments!r:.40}")
    return [_numbered(one) for one in arguments]


def _numbered(value: Any) -> Any:
    """JSON turns the keys of {1: 2} into texts; where all are numbers, they are numbers again."""
    if isinstance(value, dict) and value and all(k.lstrip("-").isdigit() for k in value):
        return {int(k): v for k, v in value.items()}
    return value


def _call(name: str, arguments: Sequence[Any], wanted: Any, wrapped: bool) -> str:
    """Python that calls the function, or the method of that name of a class `Solution`, and
    compares the result: sequences as lists. `wrapped`: the result may stand in a list of its own,
    as APPS writes it."""
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not the name of a function")
    wants = [_numbered(wanted)]
    if wrapped and isinstance(wanted, list) and len(wanted) == 1:
        wants.append(_numbered(wanted[0]))
    return (
        _taken(name) + "def plain(value):\n"
        "    if isinstance(value, (list, tuple)):\n"
        "        return [plain(one) for one in value]\n"
        "    return value\n"
        f"assert plain(called(*{_literal(list(arguments))})) in {_literal(wants)}"
    )


def _taken(name: str) -> str:
    """Python that calls the completion's function of that name, or the method of its class
    `Solution`, `called`."""
    return (
        "try:\n"
        "    from solution import Solution\n"
        f"    called = Solution().{name}\n"
        "except (ImportError, AttributeError):\n"
        f"    from solution import {name} as called\n"
    )


def _literal(value: Any) -> str:
    """The value as Python; infinities and NaN too, which JSON's reader accepts."""
    return repr(_written(value)).replace("'<inf>'", "float('inf')").replace(
        "'<-inf>'", "float('-inf')"
    ).replace("'<nan>'", "float('nan')")  # fmt: skip


def _written(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"<{value}>"
    if isinstance(value, list | tuple):
        return [_written(one) for one in value]
    if isinstance(value, dict):
        return {key: _written(one) for key, one in value.items()}
    return value


def function_name(value: Any) -> str | None:
    """The function that a row is about: its name (also as `Solution().name`), JSON or a table with
    `func_name` or `fn_name`, or code that begins the program, whose only function counts (in a
    class, its first method)."""
    if isinstance(value, Mapping):
        return value.get("func_name") or value.get("fn_name")
    if not isinstance(value, str) or not value.strip():
        return None
    if method := re.fullmatch(r"(?:Solution\(\)\.)?([A-Za-z_]\w*)", value.strip()):
        return method[1]
    if value.lstrip().startswith("{"):
        return function_name(json.loads(value))
    return _first_function(value)


def _first_function(code: str) -> str | None:
    """A starter may end with the head of a function, which is no whole program yet."""
    for tail in ("", "\n        pass", "\n    pass"):
        try:
            tree = ast.parse(code.rstrip() + tail)
        except SyntaxError:
            continue
        bodies = [one.body for one in tree.body if isinstance(one, ast.ClassDef)]
        inside = [part for body in bodies for part in body if isinstance(part, ast.FunctionDef)]
        named = [part.name for part in inside if not part.name.startswith("__")]
        return next(
            iter(named or [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]), None
        )
    return None


def _of_python(test: str, function: str | None) -> str:
    """Python that judges by itself: what pytest, unittest or HumanEval's program would call is
    called. `function`: the one that is tested."""
    if not test.strip():
        raise ValueError("a test is empty, so every program would pass it")
    compile(test, "test", "exec")
    tree = ast.parse(test)
    called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    calls = ""
    for part in tree.body:
        if isinstance(part, ast.ClassDef) and part.name not in called:
            calls += _calls_of_class(part)
        if not isinstance(part, ast.FunctionDef) or part.name in called:
            continue
        if part.name == "check" and len(part.args.args) == 1:
            calls += _check(function)
        if not part.name.startswith("test_"):
            continue
        if part.decorator_list or part.args.args:
            raise ValueError(
                f"{part.name} needs pytest (it has a decorator or a fixture), which does not "
                "run here: write its cases as calls"
            )
        calls += f"\n{part.name}()"
    return test + calls


def _check(function: str | None) -> str:
    if not function or not function.isidentifier():
        raise ValueError(
            "check(candidate) is called by nothing: name the column that has the function with "
            "`function` (HumanEval, LeetCodeDataset: entry_point)"
        )
    return f"\n{_taken(function)}check(called)"


def _calls_of_class(part: ast.ClassDef) -> str:
    """Calls of the methods `test...` of a class of unittest, or of one that pytest would find."""
    names = [one.name for one in part.body if isinstance(one, ast.FunctionDef)]
    tests = [name for name in names if name.startswith("test")]
    bases = {ast.unparse(base).rpartition(".")[2] for base in part.bases}
    if not tests or (not part.name.startswith("Test") and "TestCase" not in bases):
        return ""
    if "TestCase" in bases:  # `debug` raises what fails
        return "".join(f"\n{part.name}({name!r}).debug()" for name in tests)
    setup = "setup_method" in names
    setup_code = f"\nexample = {part.name}()" + ("\nexample.setup_method()" if setup else "")
    return "".join(f"{setup_code}\nexample.{name}()" for name in tests)


def _only_defines(test: str) -> bool:
    """Whether a test runs nothing that could fail: it names functions, classes and values, and what
    it does only as a main program."""
    quiet = (
        ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign,
        ast.AnnAssign, ast.Pass,
    )  # fmt: skip
    return all(
        isinstance(part, quiet)
        or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        or (isinstance(part, ast.If) and "__name__" in ast.unparse(part.test))
        for part in ast.parse(test).body
    )
