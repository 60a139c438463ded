"""Refusals of settings in a room's constructors: which there are, and which one a call reaches."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import UserError
from flowrl.paths import PROJECT


def constructor_refusals(room: str) -> dict[str, str]:
    """The `raise` statements in constructors of a room's classes, as FILE:LINE, with the class."""
    found = dict[str, str]()
    for path in sorted((PROJECT / room).rglob("*.py")):
        for kind in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(kind, ast.ClassDef):
                continue
            for method in kind.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__post_init__":
                    lines = [n.lineno for n in ast.walk(method) if isinstance(n, ast.Raise)]
                    found |= {f"{path}:{line}": kind.name for line in lines}
    return found


def refusal_of(make: Callable[[], Any], sentence: str) -> str:
    """FILE:LINE of the statement that refuses a call, with this sentence."""
    with pytest.raises(UserError, match=sentence) as refusal:
        make()
    last = refusal.traceback[-1]
    return f"{Path(str(last.path))}:{last.lineno + 1}"
