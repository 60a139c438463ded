"""Messages of flowrl that advise something, and the trials of them, found by their syntax tree.

A trial is a call `advice("a part of the message", ...)` anywhere in the tests, or a row of one of
the tables (`Advice`, `CommandAdvice`, `CallAdvice`): it raises the message and does what it says.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from flowrl.errors import UserError

Result = TypeVar("Result")
ROOT = Path(__file__).resolve().parents[2]
ADVICE = re.compile(
    r"[:;,] (?:also |or |and )?(?:set|lower|raise|leave|use|choose|remove|take|train|let) "
    r"|\b(?:set|leave) [a-z_]+\.[a-z_]+"
)
ERRORS = ("UserError", "ValueError")
TRIALS = ("advice", "Advice", "CallAdvice", "CommandAdvice")


def source(node: ast.expr) -> str:
    """The text of a message with {} for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(source(p) if isinstance(p, ast.Constant) else "{}" for p in parts)
        case ast.BinOp(left=left, right=right):
            return source(left) + source(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{source(body)} | {source(orelse)}"
    return ""


def messages() -> Iterator[tuple[str, str]]:
    """The file and the text of every message of flowrl that advises something."""
    for path in sorted((ROOT / "flowrl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in ERRORS and node.args:
                text = source(node.args[0])
                if ADVICE.search(text):
                    yield path.relative_to(ROOT).as_posix(), text


def trials() -> Iterator[str]:
    """What each trial says: the part of a message's source that identifies it."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in TRIALS
                and node.args
                and (says := source(node.args[0]))
            ):
                yield says


def advice(says: str, refused: Callable[[], object], follow: Callable[[], Result]) -> Result:
    """Raises a message and does what it says: `refused` must end with the message, `follow` must
    not end with an error.

    says    a part of the message's source, which identifies it, with {} for what is filled in;
            written out at the call, where `trials` finds it
    Returns what `follow` returns.
    """
    with pytest.raises((UserError, ValueError)) as error:
        refused()
    said = " ".join(str(error.value).split())
    for part in fixed_parts(says):
        assert " ".join(part.split()) in said, said
    return follow()


def fixed_parts(says: str) -> list[str]:
    """The parts of a message around what is filled in."""
    return [part.strip() for part in re.split(r"\{[^}]*\}|\"\n", says) if part.strip()]


def beginning(file: str, text: str) -> str:
    """A message's line in the list of untried ones."""
    return f"{file.removeprefix('flowrl/')}: {' '.join(text.split())[:70].strip()}"
