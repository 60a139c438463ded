"""Run Python tests in the judge's process. They reach the completion only through proxies.

Names that a test binds or imports, Python's builtins and modules never come from the completion.
All other names do; but if a row's tests use a name outside Python's library, their library names
(Counter, sqrt, ...) come from the library.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import json
import re
import symtable
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import suppress

from channel import Gone
from remote import RemoteProgram, call_in_place, came_from_program
from values import ordered, refuse_nan

TYPE_CHECKING = False  # typing itself takes a tenth of a program's start
if TYPE_CHECKING:
    from typing import Any

    from channel import Connection

SOLUTION = "solution"  # the module that has the completion's names in the tests
ALIASES = {"np": "numpy", "pd": "pandas", "sp": "scipy", "nx": "networkx", "plt": "matplotlib"}
MODULES = {"numpy", "pandas", "scipy", "pytest", "torch", "sympy", "networkx", "sklearn"}
LIBRARY = (
    *("collections", "math", "itertools", "functools", "typing", "copy"),
    *("decimal", "fractions", "datetime"),
)  # modules whose names tests use without an import
ORDERINGS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
CALLABLE = ("abs", "bool", "complex", "dict", "divmod", "float", "int", "len", "list", "max", "min",
            "range", "round", "set", "sorted", "str", "sum", "tuple")  # fmt: skip
NUMBER, IN_PLACE = "<number>", "<in place>"  # names that no code can have


@functools.cache
def library_names() -> dict[str, str]:
    """Public names of Python's standard library, each with its module."""
    modules: dict[str, str] = {}
    for module in LIBRARY:
        content = importlib.import_module(module)
        for name in getattr(content, "__all__", None) or vars(content):
            if not name.startswith("_"):
                modules.setdefault(name, module)
    return modules


class _Guarded(ast.NodeTransformer):
    """Rewrites a test: ordering comparisons refuse NaN, and calls whose result is ignored are
    marked."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if any(isinstance(op, ORDERINGS) for op in node.ops):
            node.left = _called(NUMBER, [node.left])
            node.comparators = [_called(NUMBER, [one]) for one in node.comparators]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call):
            call = node.value
            node.value = _called(IN_PLACE, [call.func, *call.args], call.keywords)
        return node


@functools.lru_cache(1024)
def _compiled(test: str) -> Any:
    guarded = ast.fix_missing_locations(_Guarded().visit(ast.parse(test)))
    return compile(guarded, "tests.py", "exec", dont_inherit=True)


def _called(name: str, arguments: list[ast.expr], named: Sequence[ast.keyword] = ()) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), arguments, list(named))


class Names:
    """Origin of each name in one row's tests: the completion, or Python's library."""

    def __init__(self, tests: Sequence[str]) -> None:
        free: set[str] = set()
        asked: set[str] = set()
        self.modules: dict[str, str] = {}
        for test in tests:
            loose, modules = _free_names(test)
            asked |= _asked_of_solution(test)
            free |= loose
            self.modules |= modules
        free -= self.modules.keys()
        of_completion = {name for name in free if name not in library_names()}
        self.completion = of_completion or (set() if asked else free)
        self.library = free - self.completion
        self.completion |= asked

    def take(self, name: str, program: RemoteProgram, defined: set[str]) -> Any:
        """The object behind a name. LookupError or ImportError if its source does not have it."""
        if name in self.modules:
            return importlib.import_module(self.modules[name])
        if name in self.library:
            return getattr(importlib.import_module(library_names()[name]), name)
        if name not in defined:
            raise LookupError(name)
        return program.get(0, name, "named")


@functools.lru_cache(1024)
def _free_names(test: str) -> tuple[set[str], dict[str, str]]:
    """Names that a test uses but does not bind; and those among them that are modules."""
    top = symtable.symtable(test, "test", "exec")
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    free = _global_names(top) - bound - vars(builtins).keys()
    bare = _bare_names(ast.parse(test))
    modules: dict[str, str] = {}
    for name in free:
        module = ALIASES.get(name, name)
        if module in MODULES or (module in sys.stdlib_module_names and name not in bare):
            modules[name] = module
    return free, modules


def _global_names(table: symtable.SymbolTable) -> set[str]:
    """Names that a scope, or a scope inside it, looks up globally."""
    names = {s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global()}
    if table.get_type() == "module":
        names = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    return names.union(*(_global_names(inner) for inner in table.get_children()))


def _bare_names(tree: ast.AST) -> set[str]:
    """Names that are not only used as `name.attribute`, as a module would be."""
    based = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in based}


@functools.lru_cache(1024)
def _asked_of_solution(test: str) -> set[str]:
    """Names that a test takes from the module `solution`."""
    asked: set[str] = set()
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.ImportFrom) and node.module == SOLUTION and not node.level:
            asked |= {alias.name for alias in node.names if alias.name != "*"}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            asked |= {node.attr} if node.value.id == SOLUTION else set()
    return asked


def _solution(program: RemoteProgram, defined: set[str]) -> types.ModuleType:
    module = types.ModuleType(SOLUTION)

    def find(name: str) -> Any:
        if name == "__all__":
            return sorted(name for name in defined if not name.startswith("_"))
        if name not in defined or name.startswith("__"):
            raise AttributeError(name)
        return program.get(0, name, "named")

    vars(module)["__getattr__"] = find
    return module


def judge_tests(connection: Connection, words: Sequence[str], write: Callable[[str], None]) -> None:
    """Write a line for each test, in order, as soon as its verdict is known: a secret word, which
    is the first entry of `words`, and `1` or `0`, or `2` and what kept this judge from a verdict.
    The other entries are the tests."""
    word, *tests = words
    sys.addaudithook(_refuse_pickles)
    row = RowUnderTest(tests, RemoteProgram(connection))
    for test in tests:
        if row.passes(test):
            write(f"{word} 1\n")
        else:
            limit = row.limit(test)
            write(f"{word} 0\n" if limit is None else f"{word} 2 {json.dumps(limit)}\n")


def _refuse_pickles(event: str, _: Any) -> None:
    """Refuse pickles, since one made by the completion could run code here, where verdicts are
    written."""
    if event == "pickle.find_class":
        raise AssertionError("only pickles of plain data are read")


def _refuse_code(*_: Any) -> None:
    """Refuse code in texts, since a text made by the completion would run here too."""
    raise AssertionError("only expressions of plain data are evaluated")


class RowUnderTest:
    """The tests of one row in one namespace: definitions of one test are available to the next."""

    def __init__(self, tests: Sequence[str], program: RemoteProgram) -> None:
        self.names, self.program, self.known = Names(tests), program, program.names()
        self.in_texts = frozenset[str]().union(*map(_words_in_texts, tests))
        sys.modules[SOLUTION] = _solution(program, self.known)
        self.space: dict[str, Any] = {"__name__": "tests", NUMBER: refuse_nan}
        self.space[IN_PLACE] = call_in_place
        self.space |= {"eval": self._evaluated, "exec": _refuse_code}
        self.space |= {function.__name__: ordered(function) for function in (max, min, sorted)}

    def _evaluated(self, source: Any, *spaces: Any) -> Any:
        """`eval` for expressions of data, operators and calls of CALLABLE only. Of the tests' own
        names it sees those that stand in texts of the tests, as in `eval(f("x + 1"))`: the others,
        such as that of the wanted result, are for nobody to guess."""
        tree = ast.parse(source.strip() if type(source) is str else source, mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Lambda | ast.NamedExpr):
                _refuse_code()
            if isinstance(node, ast.Call) and not (
                isinstance(node.func, ast.Name) and node.func.id in CALLABLE
            ):
                _refuse_code()
        seen = {
            name: value
            for space in (spaces or (self.space,))
            for name, value in space.items()
            if space is not self.space or name in self.in_texts
        }
        builtin_functions = {name: getattr(builtins, name) for name in CALLABLE}
        return eval(
            compile(tree, "text", "eval", dont_inherit=True),
            {**seen, **builtin_functions, "__builtins__": {}},
        )

    def passes(self, test: str) -> bool:
        """Whether the test runs to its end."""
        self.program.limit = None
        return passes(test, self.program, self.names, self.known, self.space)

    def limit(self, test: str) -> str | None:
        """Why the test that did not pass may not be the completion's failure, if this judge cannot
        run it for any completion."""
        return self.program.limit or _wanted_class(test, self.names.completion)


@functools.lru_cache(1024)
def _words_in_texts(test: str) -> frozenset[str]:
    """Names in the texts of a test."""
    nodes = ast.walk(ast.parse(test))
    texts = (n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return frozenset(word for text in texts for word in re.findall(r"[^\W\d]\w*", text))


@functools.lru_cache(1024)
def _wanted(test: str) -> frozenset[tuple[str, str]]:
    """Pairs of an act and a name: acts that need a class of the test's own process."""
    wanted: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            wanted |= {("catch", name) for name in _names_in(node.type)}
        if isinstance(node, ast.ClassDef):
            wanted |= {("inherit from", name) for base in node.bases for name in _names_in(base)}
        if isinstance(node, ast.Call) and len(node.args) == 2:
            if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
                wanted |= {("compare with", name) for name in _names_in(node.args[1])}
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute):
            if node.func.attr == "raises":
                wanted |= {("catch", name) for name in _names_in(node.args[0])}
    return frozenset(wanted)


def _names_in(node: ast.expr) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _wanted_class(test: str, completion: set[str]) -> str | None:
    misused = sorted((act, name) for act, name in _wanted(test) if name in completion)
    if not misused:
        return None
    act, name = misused[0]
    return f"the tests {act} {name}, a class of the program, which stays in its own process"


def passes(
    test: str, program: RemoteProgram, names: Names, defined: set[str], space: dict[str, Any]
) -> bool:
    """Whether the test runs to its end in the row's namespace."""
    try:
        for name in sorted(_free_names(test)[0] - space.keys()):
            with suppress(LookupError, ImportError):  # a NameError, if the test comes to use it
                space[name] = names.take(name, program, defined)
        exec(_compiled(test), space)
    except Gone:
        raise
    except ModuleNotFoundError as error:
        if not came_from_program(error):
            program.limit = f"the tests import {error.name}, which is not installed"
        return False
    except BaseException:  # of any kind: it did not pass
        return False
    return True
