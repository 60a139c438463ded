"""Tests in one process that call functions in another.

The process with the tests is trusted, that of the completion is not. Arguments and results travel
as plain data, so a result has no `==` of its own, and neither the tests nor their verdict is
anywhere that the completion can reach. What is not plain data stays where it is, and the tests
hold a `Distant` in its place, whose methods can be called and which equals nothing but itself.
"""

import ast
import builtins
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

LONGEST = 2**24  # bytes of a message
PLAIN_CONTAINERS = (list, tuple, set, frozenset)


class Gone(BaseException):
    """The other process has ended. No `except Exception` of a test takes it for an error."""


class Channel:
    """Messages as JSON, each after its length in 4 bytes, on one open file."""

    def __init__(self, file: int) -> None:
        self.file = file

    def send(self, message: Any) -> None:
        body = json.dumps(message).encode()
        if len(body) > LONGEST:
            raise ValueError("a value is too long to be carried over")
        left = memoryview(len(body).to_bytes(4, "little") + body)
        while left:
            try:
                left = left[os.write(self.file, left) :]
            except OSError as error:
                raise Gone from error

    def receive(self) -> Any:
        size = int.from_bytes(self._exactly(4), "little")
        if size > LONGEST:
            raise Gone
        return json.loads(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = os.read(self.file, min(size - len(parts), 2**16))
            if not part:
                raise Gone
            parts += part
        return bytes(parts)


def encode_value(value: Any, hold: Callable[[Any], int] | None) -> Any:
    """As JSON; `hold` keeps what is not plain data, and gives its number."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if isinstance(value, complex):
        return {"complex": [float.__repr__(value.real), float.__repr__(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    for kind in PLAIN_CONTAINERS:
        if isinstance(value, kind):
            return {kind.__name__: [encode_value(one, hold) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[encode_value(k, hold), encode_value(v, hold)] for k, v in value.items()]}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encode_value(value.item(), hold)
    if isinstance(value, Distant):
        return {"held": value._number}
    if hold is None:
        raise TypeError(f"a {type(value).__name__} cannot be handed to the completion")
    return {"held": hold(value)}


def decode_value(value: Any, held: Callable[[int], Any]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {decode_value(k, held): decode_value(v, held) for k, v in inner}
    for plain in PLAIN_CONTAINERS:
        if kind == plain.__name__:
            return plain(decode_value(one, held) for one in inner)
    made: dict[str, Callable[[Any], Any]] = {
        "int": lambda text: int(text, 16),
        "float": float,
        "complex": lambda pair: complex(float(pair[0]), float(pair[1])),
        "bytes": bytes.fromhex,
        "range": lambda three: range(*three),
        "held": held,
    }
    return made[kind](inner)


def _error(name: str) -> type[Exception]:
    """Python's own exception of that name, or a new kind."""
    found = vars(builtins).get(name)
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    return type(name, (Exception,), {})


class RemoteValue:
    """The tests' end of a channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def ask(self, what: str, of: int, given: Any = None) -> Any:
        self.channel.send([what, of, given])
        answer = self.channel.receive()
        if "raised" in answer:
            name, message = answer["raised"]
            raise _error(str(name))(message)
        return answer

    def value(self, what: str, of: int, given: Any = None) -> Any:
        return decode_value(self.ask(what, of, given)["value"], self.held)

    def held(self, number: int) -> "Distant":
        return Distant(self, number)


class Distant:
    """A thing of the other process."""

    def __init__(self, remote: RemoteValue, number: int) -> None:
        self._remote, self._number = remote, number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._remote.value("get", self._number, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        plain = [encode_value(a, None) for a in arguments], encode_value(named, None)
        answer = self._remote.ask("call", self._number, plain)
        for mine, theirs in zip(arguments, answer["arguments"], strict=True):
            _follow(mine, decode_value(theirs, self._remote.held))
        return decode_value(answer["value"], self._remote.held)

    def _special(self, name: str, *arguments: Any) -> Any:
        return self._remote.value("get", self._number, name)(*arguments)

    def __len__(self) -> int:
        return self._special("__len__")

    def __getitem__(self, key: Any) -> Any:
        return self._special("__getitem__", key)

    def __contains__(self, item: Any) -> bool:
        return self._special("__contains__", item)

    def __next__(self) -> Any:
        return self._special("__next__")

    def __bool__(self) -> bool:
        return self._remote.value("truth", self._number)

    def __str__(self) -> str:
        return self._special("__str__")

    def __iter__(self) -> Iterator[Any]:
        inner = self._special("__iter__")
        while True:
            try:
                yield next(inner)
            except StopIteration:
                return


def _follow(mine: Any, theirs: Any) -> None:
    """What a call did to a list, a dictionary or a set that it was given happens to ours too."""
    if isinstance(mine, list) and isinstance(theirs, list) and mine != theirs:
        mine[:] = theirs
    elif isinstance(mine, dict | set) and type(mine) is type(theirs) and mine != theirs:
        mine.clear()
        mine.update(theirs)


def serve_program(channel: Channel, code: str) -> None:
    """Run the completion, then do for the tests what they ask. It never returns."""
    space: dict[str, Any] = {"__name__": "completion", "__builtins__": builtins}
    kept: list[Any] = [space]

    def hold(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def does(what: str, of: int, given: Any) -> dict[str, Any]:
        thing = kept[of]
        if what == "names":
            return {"value": {"list": [name for name in space if isinstance(name, str)]}}
        if what == "get":
            return {"value": encode_value(space[given] if of == 0 else getattr(thing, given), hold)}
        if what == "truth":
            return {"value": bool(thing)}
        arguments, named = [decode_value(a, kept.__getitem__) for a in given[0]], given[1]
        value = thing(*arguments, **decode_value(named, kept.__getitem__))
        return {
            "value": encode_value(value, hold),
            "arguments": [encode_value(a, hold) for a in arguments],
        }

    failed: list[str] | None = None
    try:
        exec(compile(code, "completion.py", "exec"), space)
    except Exception as error:  # of any kind, since the code is anybody's
        failed = [type(error).__name__, str(error)[:1000]]
    while True:
        question = channel.receive()
        try:
            answer = {"raised": failed} if failed else does(*question)
        except Exception as error:  # of any kind again
            answer = {"raised": [type(error).__name__, str(error)[:1000]]}
        channel.send(answer)


def judge_tests(channel: Channel, tests: list[str], say: Callable[[str], None]) -> None:
    """Says `1` or `0` for each test, in order, as soon as it is known."""
    remote = RemoteValue(channel)
    names = set(remote.value("names", 0))
    for test in tests:
        say("1" if passes(test, remote, names) else "0")


def passes(test: str, remote: RemoteValue, names: set[str]) -> bool:
    """Does a test run to its end? The completion's names are there; builtin ones stay Python's."""
    tree = ast.parse(test)
    wanted = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    space: dict[str, Any] = {"__name__": "tests"}
    try:
        for name in wanted & names - vars(builtins).keys():
            standard = name in sys.stdlib_module_names
            space[name] = (
                importlib.import_module(name) if standard else remote.value("get", 0, name)
            )
        exec(compile(tree, "tests.py", "exec"), space)
    except Gone:
        raise
    except BaseException:  # of any kind: it did not pass
        return False
    return True
