"""Operators of the syntax tree: all mutants of a file, and what makes two of them the same.

A mutant's identity is what it changes, not where: the function and the statement that it stands in,
the expression, and what is put. So a mutant is found again in another tree, where its lines and its
file may have moved.
"""

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
}  # fmt: skip
BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
OTHER: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
NOT_RUN = ("annotation", "returns", "decorator_list", "type_params")  # or run by no test's call
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Made:
    """A mutant: lines and columns (in bytes, as `ast` counts) that are replaced by `put`.

    Attributes:
        judged: First and last line of what tests must run to judge it.
        identity: Equal in two trees where the same expression of the same statement is changed.
    """

    file: str
    operator: str
    line: int
    column: int
    end_line: int
    end_column: int
    put: str
    judged: tuple[int, int]
    identity: str

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.operator} {self.put}"

    def applied(self, text: str) -> str:
        lines = text.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        end = sum(map(len, lines[: self.end_line - 1])) + self.end_column
        whole = b"".join(lines)
        return (whole[:start] + self.put.encode() + whole[end:]).decode()


def variants(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Operators that apply to a node, and what each puts in its place."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for name, table in (("comparison", NEGATED), ("boundary", BOUNDARY)):
            if (op := table.get(type(node.ops[0]))) is not None:
                yield name, _changed(node, ops=[op()])
    elif isinstance(node, ast.BinOp) and type(node.op) in OTHER:
        yield "arithmetic", _changed(node, op=OTHER[type(node.op)]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not | ast.Invert):
        yield "sign", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BoolOp):
        yield "boolean", _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.Constant):
        yield from _constants(node)
    elif isinstance(node, ast.IfExp):
        yield "branch", _changed(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Raise):
        yield "dropped raise", "pass"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "dropped call", "pass"
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        a, b, *more = node.args
        if not isinstance(a, ast.Starred) and ast.dump(a) != ast.dump(b):
            yield "swapped arguments", _changed(node, args=[b, a, *more])


def _changed(node: ast.expr, **fields: object) -> str:
    """The source of a node with other fields."""
    other = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return f"({ast.unparse(other)})"


def _constants(node: ast.Constant) -> Iterator[tuple[str, str]]:
    if isinstance(node.value, bool):
        yield "constant", str(not node.value)
    elif isinstance(node.value, int):
        yield "constant", repr(node.value + 1)
    elif isinstance(node.value, float):
        yield "constant", repr(2 * node.value or 1.0)


@dataclass(frozen=True)
class Around:
    """The surroundings of a node.

    Attributes:
        names: The classes and functions, outermost first.
        statement: The statement's source, of one with a body its head alone.
        first: The statement's first line.
        whole: First and last line of the function or class if the node runs when that is defined,
            as a default value does, else of the file.
        at_import: The node runs when its file is imported.
    """

    names: tuple[str, ...]
    statement: str
    first: int
    whole: tuple[int, int]
    at_import: bool

    def inside(self, node: ast.AST, field: str) -> "Around":
        """Around what stands in a field of a node that this is around."""
        if field != "body" or not isinstance(node, Function | ast.ClassDef):
            return self
        at_import = self.at_import and isinstance(node, ast.ClassDef)
        return replace(self, names=(*self.names, node.name), at_import=at_import)

    def at(self, node: ast.AST) -> "Around":
        """Around a node that stands in this, and its parts."""
        if not isinstance(node, ast.stmt):
            return self
        here = replace(self, statement=head(node), first=node.lineno)
        if isinstance(node, Function | ast.ClassDef):
            here = replace(here, whole=(node.lineno, node.end_lineno or node.lineno))
        return here


def head(statement: ast.stmt) -> str:
    """A statement's source; of one with a body, what stands before the body."""
    alone = copy.copy(statement)
    for name in (*BODIES, "decorator_list"):
        if name in statement._fields:
            setattr(alone, name, [])
    return ast.unparse(alone)


def mutated_nodes(tree: ast.AST, around: Around) -> Iterator[tuple[ast.AST, Around]]:
    """Nodes that have a place of their own and a meaning at run time: no annotations, assertions,
    messages of errors, or parts of formatted strings."""
    for name, value in ast.iter_fields(tree):
        if name in NOT_RUN:
            continue
        inside = around.inside(tree, name)
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr | ast.Assert):
                continue
            here = inside.at(node)
            yield node, here
            if not isinstance(node, ast.Raise):
                yield from mutated_nodes(node, here)


def mutants_of(file: str, text: str) -> list[Made]:
    """All mutants of a file's text.

    Tests that run the mutant's statement judge it. What runs at import is run by whichever test
    comes first; it is judged by the tests that run the function, the class or the file around it.
    """
    made, copies = list[Made](), Counter[str]()
    last = text.count("\n") + 1
    for node, around in mutated_nodes(ast.parse(text), Around((), "", 1, (1, last), True)):
        for operator, put in variants(node):
            if not isinstance(node, ast.expr | ast.stmt) or node.end_lineno is None:
                continue
            what = (around.names, around.statement, ast.unparse(node), operator, put)
            copies[repr(what)] += 1
            identity = hashlib.sha256(repr((what, copies[repr(what)])).encode()).hexdigest()[:16]
            own = (around.first, node.end_lineno)
            made.append(
                Made(
                    file=file,
                    operator=operator,
                    line=node.lineno,
                    column=node.col_offset,
                    end_line=node.end_lineno,
                    end_column=node.end_col_offset or 0,
                    put=put,
                    judged=around.whole if around.at_import else own,
                    identity=identity,
                )
            )
    return made
