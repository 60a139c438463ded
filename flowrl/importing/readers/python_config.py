"""A Python configuration as values: a small evaluator of its syntax tree, which executes nothing.

It knows what such files are made of: assignments, functions of the same file or of a file beside
it, ConfigDicts, numbers, texts, lists, mappings, arithmetic, comparisons, `if`, `assert`, f-strings
and a few functions. Anything else is an error that names its line.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flowrl.bounded_files import bounded_bytes
from flowrl.errors import UserError
from flowrl.importing.leaves import Secret, Unresolved

_MOST_CHARACTERS = 2**18
_MOST_CALLS = 2_000
_MOST_ROUNDS = 10_000  # of all loops together
_DEEPEST = 30
_LARGEST = 1e15
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_CALLS: Mapping[str, Callable[..., Any]] = {
    "int": int, "float": float, "str": str, "bool": bool, "len": len, "min": min, "max": max,
    "round": round, "abs": abs, "list": list, "tuple": tuple, "dict": dict, "sum": sum,
    "math.ceil": math.ceil, "math.floor": math.floor, "sorted": sorted,
    "enumerate": lambda items, start=0: [list(pair) for pair in enumerate(items, start)],
    "zip": lambda *items: [list(row) for row in zip(*items, strict=False)],
    "reversed": lambda items: items[::-1],
}  # fmt: skip
_DICTS = ("ml_collections.ConfigDict", "ConfigDict", "config_dict.ConfigDict")
_PLACES = {"os.getcwd": ""}
_PATHS = (
    "os.path.join", "posixpath.join", "os.path.dirname", "os.path.abspath", "os.path.expanduser",
)  # fmt: skip


class Fields(dict[str, Any]):
    """A ConfigDict: values by name, read and set as attributes or items."""


class _Module:
    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path = path
        self.functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        self.names: dict[str, Any] = {}


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Break(Exception):
    """A `break` on its way to its loop."""


class _Continue(Exception):
    """A `continue` on its way to its loop."""


def source_text(path: Path) -> str:
    """The text of a file of settings. UserError for one that cannot be read or is too long."""
    try:
        return bounded_bytes(path, 4 * _MOST_CHARACTERS).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the file: {error}") from error


def python_tree(path: Path) -> ast.Module:
    """The syntax tree of a Python file. UserError for a file that cannot be read."""
    text = source_text(path)
    if len(text) > _MOST_CHARACTERS:
        raise UserError(f"{path}: more than {_MOST_CHARACTERS} characters, too many for settings")
    try:
        return ast.parse(text)
    except (SyntaxError, RecursionError, ValueError) as error:
        raise UserError(f"{path}: not valid Python: {error}") from error


def config_functions(path: Path) -> list[str]:
    """The functions of a file that take no arguments, and may so be a configuration each; the base
    that they begin with, get_config, only if it is the sole one."""
    tree = python_tree(path)
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and not _arguments(n)]
    return [name for name in names if name != "get_config"] or names


def evaluated_config(path: Path, function: str) -> tuple[Fields, list[str]]:
    """The ConfigDict that a function returns, and the messages of assertions that fail.

    UserError, with the line, for what the evaluator does not know.
    """
    reader = _Evaluator()
    module = reader.module(path)
    if function not in module.functions:
        names = ", ".join(config_functions(path)) or "none without arguments"
        raise UserError(f"{path}: no function {function}; it has {names}")
    value = reader.call(module, module.functions[function], {})
    if not isinstance(value, Fields):
        raise UserError(f"{path}: {function} returns no ConfigDict")
    if _is_larger(value, _MOST_ROUNDS):
        raise UserError(f"{path}: {function} returns too many values for settings")
    return value, reader.failed


def _arguments(node: ast.FunctionDef) -> list[str]:
    return [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _changes(node: ast.stmt, names: Mapping[str, Any]) -> bool:
    """Whether a statement is a call of a method of something that the file has made."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    return _dotted(node.value.func).partition(".")[0] in names


def _is_larger(value: Any, most: int) -> bool:
    """Whether nested lists and mappings have more than `most` parts, counted with repetitions."""
    left, count = [value], 0
    while left and count <= most:
        one = left.pop()
        count += 1
        if isinstance(one, dict | list | tuple):
            left += one.values() if isinstance(one, dict) else one
    return count > most


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


class _Evaluator:
    def __init__(self) -> None:
        self.modules: dict[Path, _Module] = {}
        self.failed: list[str] = []
        self.calls = 0
        self.rounds = 0
        self.depth = 0

    def module(self, path: Path) -> _Module:
        path = path.resolve()
        if path not in self.modules:
            tree = python_tree(path)
            module = self.modules[path] = _Module(path, tree)
            for node in tree.body:
                if isinstance(
                    node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.If | ast.For
                ) or _changes(node, module.names):
                    self.run(module, module.names, node)
        return self.modules[path]

    def call(self, module: _Module, node: ast.FunctionDef, arguments: Mapping[str, Any]) -> Any:
        self.calls += 1
        self.depth += 1
        if self.calls > _MOST_CALLS or self.depth > _DEEPEST:
            raise UserError(f"{module.path}: line {node.lineno}: too many calls for settings")
        names = dict(arguments)
        defaults = node.args.defaults
        for name, value in zip(
            _arguments(node)[len(_arguments(node)) - len(defaults) :], defaults, strict=False
        ):
            names.setdefault(name, self.value(module, names, value))
        try:
            for statement in node.body:
                self.run(module, names, statement)
        except _Return as result:
            return result.value
        except (_Break, _Continue) as stray:
            raise self.unknown(module, node, "a break or continue outside a loop") from stray
        finally:
            self.depth -= 1
        return None

    def run(self, module: _Module, names: dict[str, Any], node: ast.stmt) -> None:
        match node:
            case ast.Assign():
                value = self.value(module, names, node.value)
                for target in node.targets:
                    self.assign(module, names, target, value)
            case ast.AnnAssign():
                if node.value is not None:
                    self.assign(module, names, node.target, self.value(module, names, node.value))
            case ast.AugAssign(target=target, op=op, value=value):
                old = self.value(module, names, ast.copy_location(_loaded(target), target))
                new = self.binary(module, node, type(op), old, self.value(module, names, value))
                self.assign(module, names, target, new)
            case ast.Return():
                raise _Return(None if node.value is None else self.value(module, names, node.value))
            case ast.If():
                test = self.value(module, names, node.test)
                if isinstance(test, Unresolved | Secret):
                    raise self.unknown(module, node, "a condition that the file does not decide")
                for statement in node.body if test else node.orelse:
                    self.run(module, names, statement)
            case ast.For():
                self.loop(module, names, node)
            case ast.Break():
                raise _Break
            case ast.Continue():
                raise _Continue
            case ast.Assert():
                if self.value(module, names, node.test) is False:
                    message = "" if node.msg is None else self.value(module, names, node.msg)
                    self.failed.append(f"line {node.lineno}: {message or ast.unparse(node.test)}")
            case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Import() | ast.ImportFrom():
                pass
            case ast.Expr(value=ast.Call()):
                self.value(module, names, node.value)
            case ast.With():
                for statement in node.body:
                    self.run(module, names, statement)
            case ast.FunctionDef():
                module.functions[node.name] = node
            case _:
                raise self.unknown(module, node, type(node).__name__)

    def loop(self, module: _Module, names: dict[str, Any], node: ast.For) -> None:
        for item in self.items(module, names, node.iter):
            self.assign(module, names, node.target, item)
            try:
                for statement in node.body:
                    self.run(module, names, statement)
            except _Continue:
                continue
            except _Break:
                return
        for statement in node.orelse:
            self.run(module, names, statement)

    def items(self, module: _Module, names: dict[str, Any], node: ast.expr) -> list[Any]:
        """The items of a loop: of a list, a text, the names of a mapping, or a range."""
        if isinstance(node, ast.Call) and _dotted(node.func) == "range" and not node.keywords:
            bounds = [self.value(module, names, argument) for argument in node.args]
            if not 1 <= len(bounds) <= 3 or not all(isinstance(bound, int) for bound in bounds):
                raise self.unknown(module, node, ast.unparse(node))
            if len(bounds) == 3 and bounds[2] == 0:
                raise self.unknown(module, node, ast.unparse(node))
            over: Any = range(*bounds)
        else:
            over = self.value(module, names, node)
        if not isinstance(over, range | list | tuple | str | dict):
            raise self.unknown(module, node, f"a loop over {ast.unparse(node)}")
        self.rounds += len(over)
        if self.rounds > _MOST_ROUNDS:
            raise UserError(f"{module.path}: line {node.lineno}: too many rounds for settings")
        return list(over)

    def comprehension(
        self,
        module: _Module,
        names: dict[str, Any],
        node: ast.ListComp | ast.DictComp | ast.GeneratorExp,
    ) -> Any:
        """A list or mapping of one loop over items, with its conditions."""
        if len(node.generators) != 1 or node.generators[0].is_async:
            raise self.unknown(module, node, ast.unparse(node))
        [generator] = node.generators
        inner = dict(names)  # the loop's names are its own
        rows = list[Any]()
        for item in self.items(module, names, generator.iter):
            self.assign(module, inner, generator.target, item)
            tests = [self.value(module, inner, test) for test in generator.ifs]
            if any(isinstance(test, Unresolved | Secret) for test in tests):
                raise self.unknown(module, node, "a condition that the file does not decide")
            if all(tests) and isinstance(node, ast.DictComp):
                rows.append([self.value(module, inner, part) for part in (node.key, node.value)])
            elif all(tests) and isinstance(node, ast.ListComp | ast.GeneratorExp):
                rows.append(self.value(module, inner, node.elt))
        return dict(rows) if isinstance(node, ast.DictComp) else rows

    def assign(self, module: _Module, names: dict[str, Any], target: ast.expr, value: Any) -> None:
        self.check_size(module, target, value)
        match target:
            case ast.Name():
                names[target.id] = value
            case ast.Attribute():
                self.fields(module, names, target)[target.attr] = value
            case ast.Subscript():
                self.fields(module, names, target)[self.value(module, names, target.slice)] = value
            case ast.Tuple() | ast.List():
                if not isinstance(value, list | tuple) or len(value) != len(target.elts):
                    raise self.unknown(module, target, ast.unparse(target))
                for inner, one in zip(target.elts, value, strict=True):
                    self.assign(module, names, inner, one)
            case _:
                raise self.unknown(module, target, "a target of an assignment")

    def check_size(self, module: _Module, node: ast.AST, value: Any) -> None:
        """UserError for lists in lists that a few lines can make as large as memory."""
        if isinstance(value, dict | list | tuple) and _is_larger(value, _MOST_ROUNDS):
            raise self.unknown(module, node, "a value that is too long")

    def fields(
        self, module: _Module, names: dict[str, Any], target: ast.Attribute | ast.Subscript
    ) -> dict[Any, Any]:
        owner = self.value(module, names, target.value)
        if not isinstance(owner, dict):
            raise self.unknown(module, target, "an assignment to something else than a ConfigDict")
        return owner

    def value(self, module: _Module, names: dict[str, Any], node: ast.expr) -> Any:
        def value_of(inner: ast.expr) -> Any:
            return self.value(module, names, inner)

        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                for scope in (names, module.names):
                    if node.id in scope:
                        return scope[node.id]
                if node.id == "__file__":
                    return str(module.path)
                raise self.unknown(module, node, f"the name {node.id}")
            case ast.Attribute():
                owner = value_of(node.value) if _dotted(node) not in _PLACES else None
                if isinstance(owner, dict) and node.attr in owner:
                    return owner[node.attr]
                raise self.unknown(module, node, ast.unparse(node))
            case ast.Subscript():
                if _dotted(node.value) == "os.environ":
                    return Secret(str(value_of(node.slice)))
                try:
                    return value_of(node.value)[value_of(node.slice)]
                except (KeyError, IndexError, TypeError) as error:
                    raise self.unknown(module, node, ast.unparse(node)) from error
            case ast.List() | ast.Tuple() | ast.Set():
                return [value_of(inner) for inner in node.elts]
            case ast.Dict():
                if None in node.keys:
                    raise self.unknown(module, node, "** in a mapping")
                return {
                    value_of(k): value_of(v)
                    for k, v in zip(node.keys, node.values, strict=True)
                    if k
                }
            case ast.BinOp():
                return self.binary(
                    module, node, type(node.op), value_of(node.left), value_of(node.right)
                )
            case ast.UnaryOp() | ast.BoolOp() | ast.IfExp():
                return self.decided(module, node, value_of)
            case ast.Compare():
                left, held = value_of(node.left), True
                for op, inner in zip(node.ops, node.comparators, strict=True):
                    right = value_of(inner)
                    if any(isinstance(side, Unresolved | Secret) for side in (left, right)):
                        return Unresolved(ast.unparse(node))
                    held = held and _COMPARE[type(op)](left, right)
                    left = right
                return held
            case ast.JoinedStr():
                inserted = [
                    value_of(v.value) if isinstance(v, ast.FormattedValue) else value_of(v)
                    for v in node.values
                ]
                if any(isinstance(part, Unresolved | Secret) for part in inserted):
                    return Unresolved(ast.unparse(node))
                return "".join(map(str, inserted))
            case ast.ListComp() | ast.DictComp() | ast.GeneratorExp():
                return self.comprehension(module, names, node)
            case ast.Call() if _dotted(node.func) == "range":
                return self.items(module, names, node)
            case ast.Call():
                return self.called(module, names, node)
            case _:
                raise self.unknown(module, node, ast.unparse(node))

    def decided(
        self,
        module: _Module,
        node: ast.UnaryOp | ast.BoolOp | ast.IfExp,
        value_of: Callable[[ast.expr], Any],
    ) -> Any:
        """A negation, `and`, `or` or `x if y else z`; unresolved where a part that decides is."""
        value: Any = None
        if isinstance(node, ast.BoolOp):
            for inner in node.values:
                value = value_of(inner)
                if isinstance(value, Unresolved | Secret):
                    return Unresolved(ast.unparse(node))
                if bool(value) is isinstance(node.op, ast.Or):
                    break
            return value
        value = value_of(node.test if isinstance(node, ast.IfExp) else node.operand)
        if isinstance(value, Unresolved | Secret):
            return Unresolved(ast.unparse(node))
        if isinstance(node, ast.IfExp):
            return value_of(node.body if value else node.orelse)
        if isinstance(node.op, ast.Not):
            return not value
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        raise self.unknown(module, node, ast.unparse(node))

    def binary(self, module: _Module, node: ast.AST, op: type[ast.operator], a: Any, b: Any) -> Any:
        if isinstance(a, Unresolved | Secret) or isinstance(b, Unresolved | Secret):
            return Unresolved(ast.unparse(node))
        if op is ast.Pow and isinstance(a, int | float) and isinstance(b, int | float):
            if abs(b) > 64 or abs(a) > 1e6:
                raise self.unknown(module, node, "a power that is too large")
            return a**b
        if op is ast.Mult and any(isinstance(operand, str | list) for operand in (a, b)):
            raise self.unknown(module, node, "a repeated text or list")
        try:
            result = _BINARY[op](a, b)
        except (KeyError, TypeError, ZeroDivisionError, ValueError, OverflowError) as error:
            raise self.unknown(module, node, ast.unparse(node)) from error
        if isinstance(result, int | float) and abs(result) > _LARGEST:
            raise self.unknown(module, node, "a number that is too large")
        if isinstance(result, str | list) and len(result) > 10_000:
            raise self.unknown(module, node, "a value that is too long")
        return result

    def called(self, module: _Module, names: dict[str, Any], node: ast.Call) -> Any:
        name = _dotted(node.func)
        arguments = [self.value(module, names, argument) for argument in node.args]
        named = {k.arg: self.value(module, names, k.value) for k in node.keywords if k.arg}
        if name in _DICTS:
            return Fields(arguments[0] if arguments else named)
        if name in _PLACES:
            return _PLACES[name]
        if name in (*_PATHS, *_CALLS) and any(
            isinstance(g, Unresolved | Secret) for g in arguments
        ):
            return Unresolved(ast.unparse(node))
        if name in ("os.path.join", "posixpath.join"):
            return "/".join(str(part).rstrip("/") for part in arguments if str(part))
        if name in ("os.path.dirname", "os.path.abspath", "os.path.expanduser"):
            return str(Path(arguments[0]).parent) if name.endswith("dirname") else arguments[0]
        if name in ("os.environ.get", "os.getenv"):
            return arguments[1] if len(arguments) > 1 else Unresolved(f"${arguments[0]}")
        if name.endswith("load_source"):  # imp.load_source("base", PATH)
            return self.module(Path(arguments[1]))
        if name in _CALLS:
            try:
                return _CALLS[name](*arguments, **named)
            except (TypeError, ValueError, OverflowError) as error:
                raise self.unknown(module, node, ast.unparse(node)) from error
        if isinstance(node.func, ast.Name) and node.func.id in module.functions:
            function = module.functions[node.func.id]
            return self.call(
                module, function, dict(zip(_arguments(function), arguments, strict=False)) | named
            )
        if isinstance(node.func, ast.Attribute):
            return self.method(module, names, node, arguments, named)
        raise self.unknown(module, node, ast.unparse(node.func))

    def method(
        self,
        module: _Module,
        names: dict[str, Any],
        node: ast.Call,
        arguments: list[Any],
        named: Any,
    ) -> Any:
        assert isinstance(node.func, ast.Attribute)
        owner, name = self.value(module, names, node.func.value), node.func.attr
        if isinstance(owner, _Module) and name in owner.functions:
            function = owner.functions[name]
            return self.call(
                owner, function, dict(zip(_arguments(function), arguments, strict=False)) | named
            )
        if isinstance(owner, dict) and name == "update":
            for values in (*arguments, named):
                self.check_size(module, node, values)
                owner.update(values)
            return None
        if isinstance(owner, dict) and name in ("items", "keys", "values") and not arguments:
            return (
                [list(pair) for pair in owner.items()]
                if name == "items"
                else [*getattr(owner, name)()]
            )
        if isinstance(owner, list) and name in ("append", "extend") and len(arguments) == 1:
            more = arguments[0] if name == "extend" else arguments
            if not isinstance(more, list | tuple):
                raise self.unknown(module, node, ast.unparse(node))
            self.check_size(module, node, more)
            if len(owner) > _MOST_ROUNDS:
                raise self.unknown(module, node, "a value that is too long")
            owner.extend(list(more))
            return None
        if isinstance(owner, dict) and name in ("unlock", "lock", "unlocked"):
            return None
        if isinstance(owner, dict) and name == "get":
            return owner.get(*arguments)
        if isinstance(owner, str) and name in ("lower", "upper", "strip", "replace"):
            return getattr(owner, name)(*arguments, **named)
        raise self.unknown(module, node, ast.unparse(node.func))

    @staticmethod
    def unknown(module: _Module, node: Any, code: str) -> UserError:
        return UserError(
            f"{module.path}: line {node.lineno}: {code[:120]} is not read, since an import runs no "
            "code: write the value itself"
        )


def _loaded(target: ast.expr) -> ast.expr:
    """The target of an assignment, to be read."""
    return ast.parse(ast.unparse(target), mode="eval").body
