"""Messages of flowrl that advise something, and the trials of them, found by their syntax tree.

A trial is a call `advice("a part of the message", ...)` anywhere in the tests, or a row of one of
the tables (`Advice`, `CommandAdvice`, `CallAdvice`): it raises the message and does what it says.
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

from flowrl.errors import UserError

Result = TypeVar("Result")
ROOT = Path(__file__).resolve().parents[2]
# An imperative after a clause ("..., which needs X: set Y, or leave Z out"), or a setting to set.
VERBS = """
    add accept begin bring call change check choose convert copy correct create decode download
    draw encode end export fix give hand import install keep launch leave let load log lower make
    merge move name pad pass permit pip predict put raise read remove rename repair replace rescale
    restart restore resume return run sample save send separate set share shorten start switch
    take test train try unpack unset use vote wait wrap write
"""
ADVICE = re.compile(
    rf"[:;,] (?:also |or |and |then )?(?:{'|'.join(VERBS.split())}) "
    r"|\b(?:set|leave) [a-z_]+\.[a-z_]+"
)
PACKAGES = ("flowrl", "rewards", "samplers")
ERRORS = ("UserError", "ValueError")
REFUSALS = (UserError, ValueError, TypeError, OSError, RuntimeError)
TRIALS = ("advice", "Advice", "CallAdvice", "CommandAdvice")
TRIAL = re.compile(rf"\b(?:{'|'.join(TRIALS)})\(")


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


def raised(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls that make an error: in a `raise`, or of a class that users see."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call() as call):
                yield call
            case ast.Call(func=ast.Name(id=name)) if name in ERRORS:
                yield node


@cache
def messages() -> tuple[tuple[str, str], ...]:
    """The file and the text of every message of an error that advises something, each once."""
    return tuple(_messages())


def _messages() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            calls = raised(ast.parse(path.read_text(encoding="utf-8")))
            texts = (source(call.args[0]) for call in calls if call.args)
            for text in dict.fromkeys(text for text in texts if ADVICE.search(text)):
                yield path.relative_to(ROOT).as_posix(), text


@cache
def trials() -> tuple[str, ...]:
    """What each trial says: the part of a message's source that identifies it."""
    return tuple(_trials())


def _trials() -> Iterator[str]:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not TRIAL.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
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
    with pytest.raises(REFUSALS) as error:
        refused()
    said = in_one_line(str(error.value))
    for part in fixed_parts(says):
        assert in_one_line(part) in said, said
    return follow()


@cache
def in_one_line(text: str) -> str:
    return " ".join(text.split())


def fixed_parts(says: str) -> list[str]:
    """The parts of a message around what is filled in."""
    return [part.strip() for part in re.split(r"\{[^}]*\}|\"\n", says) if part.strip()]
