"""The completion's process: it runs the code, then serves the requests of the judge's tests."""

from __future__ import annotations

import builtins
import itertools
import os
import sys
import types

from channel import Channel
from mappings import share_by_files
from values import decode_value, encode_value

TYPE_CHECKING = False  # typing itself takes a tenth of a program's start
if TYPE_CHECKING:
    from typing import Any

ITERATORS = (
    types.GeneratorType, map, filter, zip, enumerate, reversed, itertools.chain, itertools.islice,
    itertools.count, itertools.cycle, itertools.repeat, itertools.accumulate, itertools.product,
    itertools.permutations, itertools.combinations, itertools.groupby, itertools.takewhile,
    type(iter([])), type(iter(())), type(iter("")), type(iter({})), type(iter(set())),
    type(iter(range(0))),
)  # fmt: skip


def new_module(name: str, file: str | None) -> dict[str, Any]:
    """The namespace of a new module that code can find by its name, as pickles, data classes and
    annotations do."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    space = vars(module)
    space["__builtins__"] = builtins
    if file is not None:
        space["__file__"] = os.path.abspath(file)
    return space


def add_site_names() -> None:
    """`exit`, `quit`, `help`, ...: Python's start adds them, but not with the option -S,
    which this process has."""
    import site

    site.setquit()
    site.sethelper()
    site.setcopyright()


def run_script(code: bytes, file: str) -> None:
    """Run code as `python FILE` does: its module is `__main__`, and what lies beside it can be
    imported. The file is written again, since the process may have another root."""
    with open(file, "wb") as copy:
        copy.write(code)
    add_site_names()
    share_by_files()
    sys.path.insert(0, os.getcwd())
    space = new_module("__main__", file)
    exec(compile(code, space["__file__"], "exec", dont_inherit=True), space)


class Program:
    """The completion after it ran, and the objects that the judge refers to by number."""

    def __init__(self, code: str | bytes) -> None:
        self.space = new_module("completion", None)
        self.kept: list[Any] = [self.space]
        self.failed: list[str] | None = None
        try:
            exec(compile(code, "completion.py", "exec", dont_inherit=True), self.space)
        except Exception as error:  # of any kind, since the code is not ours
            self.failed = [type(error).__name__, str(error)[:1000]]

    def answer(self, question: list[Any]) -> dict[str, Any]:
        try:
            return {"raised": self.failed} if self.failed else self._result(*question)
        except Exception as error:  # of any kind again
            return {"raised": [type(error).__name__, str(error)[:1000]]}

    def _result(self, request: str, number: int, detail: Any = None) -> dict[str, Any]:
        if request == "names":
            return {"value": {"list": [name for name in self.space if isinstance(name, str)]}}
        target = self.kept[number]
        if request == "get":
            return {
                "value": self._encode(target[detail] if number == 0 else getattr(target, detail))
            }
        if request == "truth":
            return {"value": bool(target)}
        arguments, named = [self._decode(one) for one in detail[0]], self._decode(detail[1])
        value = target(*arguments, **named)
        return {"value": self._encode(value), "arguments": [self._encode(a) for a in arguments]}

    def _encode(self, value: Any) -> Any:
        return encode_value(value, self._hold)

    def _decode(self, value: Any) -> Any:
        return decode_value(value, lambda entry: self.kept[entry["held"]])

    def _hold(self, value: Any) -> dict[str, int]:
        self.kept.append(value)
        kind = "iterator" if isinstance(value, ITERATORS) else "held"
        kind = "class" if isinstance(value, type) else kind
        return {kind: len(self.kept) - 1}


def serve_program(channel: Channel, code: bytes) -> None:
    """Run the completion, then answer the judge's requests. Never returns."""
    add_site_names()
    share_by_files()
    program = Program(code)
    while True:
        channel.send(program.answer(channel.receive()))
