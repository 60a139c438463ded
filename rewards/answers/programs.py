"""The program in a text: its fenced blocks (CommonMark), and which of them counts."""

import ast
import re
import textwrap
import warnings
from dataclasses import dataclass

PYTHON = ("python", "python3", "py")
_OPENS = re.compile(r"^(\s*(?:[-*+]\s+|\d+[.)]\s+)?)(`{3,}|~{3,})[ \t]*\{?\.?(\w*)([^\n]*)$")


@dataclass(frozen=True)
class Block:
    """A closed fenced block: its language in lower case, empty if it has none, and its content."""

    language: str
    content: str


def fenced_blocks(text: str) -> list[Block]:
    """All closed blocks in order. They may stand in a list, where they are indented; the content
    loses what its fence is indented by. Lines may end with CRLF."""
    blocks: list[Block] = []
    fence, language, indent, lines = "", "", 0, list[str]()
    for line in text.replace("\r\n", "\n").split("\n"):
        if fence:
            if _closes(line, fence):
                content = "".join(f"{one}\n" for one in lines)
                blocks.append(Block(language, textwrap.dedent(content) if indent else content))
                fence, lines = "", []
            else:
                lines.append(line[min(indent, len(line) - len(line.lstrip())) :])
        elif (opens := _OPENS.match(line)) and not ("`" in opens[2] and "`" in opens[4]):
            before, fence, language = opens[1], opens[2], opens[3].lower()
            indent = len(before)
    return blocks


def _closes(line: str, fence: str) -> bool:
    bare = line.strip()
    return len(bare) >= len(fence) and set(bare) == {fence[0]}


def last_program(text: str) -> str | None:
    """The last block that says it is Python; if none does, the last one without a language that has
    a statement in it, since a sample of the output stands in such a block too, else the last one
    without a language. None if there is no such block, or it is not closed. Blocks behind the last
    `</think>` come before those of the reasoning."""
    _, ended, answer = text.rpartition("</think>")
    return (ended and _last_program(answer)) or _last_program(text)


def _last_program(text: str) -> str | None:
    blocks = fenced_blocks(text)
    named = [block.content for block in blocks if block.language in PYTHON]
    bare = [block.content for block in blocks if not block.language]
    for blocks_of in (named, [one for one in bare if _does_something(one)], bare):
        if blocks_of:
            return blocks_of[-1]
    return None


LIBRARY_IMPORTS = """\
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from typing import *
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator
import random, re, statistics, string, sys
"""
"""What the judges of APPS and LiveCodeBench import before a program whose function they call
(hendrycks/apps, eval/testing_util.py; LiveCodeBench, lcb_runner/evaluation/testing_util.py), from
Python's library."""
_OFFERED = f"""\
def _offer_library(names):
    import builtins
    exec({LIBRARY_IMPORTS!r}, names)
    for name, value in names.items():
        vars(builtins).setdefault(name, value)
_offer_library({{}})
del _offer_library
"""
_FUTURE = re.compile(r"^from __future__ import .*\n?", re.MULTILINE)


def with_library(code: str) -> str:
    """The program with names of Python's library that it may use without importing them.

    They stand among its builtins, behind Python's own: what it defines or imports comes first, and
    a name that it only may use is none of its module's, so no test takes `operator.add` for a
    missing `add`.
    """
    first = "".join(_FUTURE.findall(code))
    return first + _OFFERED + _FUTURE.sub("", code)


def _does_something(code: str) -> bool:
    """Whether it is Python that is more than values: `5` and `[1, 2]` are values."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    acts = (ast.Call, ast.Await, ast.Yield, ast.NamedExpr)
    return any(
        not isinstance(part, ast.Expr) or any(isinstance(one, acts) for one in ast.walk(part))
        for part in tree.body
    )
