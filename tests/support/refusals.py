"""Refusals of settings in a room's constructors: which there are, and which one a call reaches."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import UserError
from flowrl.number_checks import check_number
from flowrl.paths import PROJECT

RAISED = ("raise ValueError", "raise UserError")


def constructor_refusals(room: str) -> dict[str, str]:
    """The statements in constructors of a room's classes that refuse, as FILE:LINE, with the class:
    each `raise`, and each call of `check_number`."""
    found = dict[str, str]()
    for path in sorted((PROJECT / room).rglob("*.py")):
        for kind in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(kind, ast.ClassDef):
                continue
            for method in kind.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__post_init__":
                    statements = (
                        node
                        for node in ast.walk(method)
                        if isinstance(node, ast.Raise | ast.Call) and _refuses(node)
                    )
                    found |= {f"{path}:{node.lineno}": kind.name for node in statements}
    return found


def refusal_of(make: Callable[[], Any], sentence: str) -> str:
    """FILE:LINE of the statement that refuses a call, with this sentence."""
    with pytest.raises(UserError, match=sentence) as refusal:
        make()
    last = [entry for entry in refusal.traceback if entry.name == "__post_init__"][-1]
    return f"{Path(str(last.path))}:{last.lineno + 1}"


def refusals_in(room: str) -> dict[str, str]:
    """The statements of a room that raise a ValueError or a UserError, as FILE:LINE, with the
    statement."""
    return {
        f"{path}:{node.lineno}": ast.unparse(node)
        for path in sorted((PROJECT / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and ast.unparse(node).startswith(RAISED)
    }


def refusal_in(room: str, make: Callable[[], Any], sentence: str) -> str:
    """FILE:LINE of the statement of the room that refuses a call, with this sentence; empty if
    another's code does."""
    with pytest.raises(ValueError, match=sentence) as refusal:
        make()
    inside = [entry for entry in refusal.traceback if _inside(Path(str(entry.path)), room)]
    return f"{Path(str(inside[-1].path))}:{inside[-1].lineno + 1}" if inside else ""


def _inside(path: Path, room: str) -> bool:
    return path.is_relative_to(PROJECT / room)


def _refuses(node: ast.Raise | ast.Call) -> bool:
    if isinstance(node, ast.Raise):
        return True
    return isinstance(node.func, ast.Name) and node.func.id == check_number.__name__
