"""The judge's view of the completion: proxies whose every result is plain data.

An object with its own methods could cheat: pass `3 in f(2)` by claiming to contain everything. So a
proxy has attributes and can be called, and an iterator can be read once. Only objects that the test
itself constructs, from a class whose name begins with a capital letter, support `len`, `in`, `[]`,
`bool`, `str` and iteration: there the test is about these methods.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator

from values import decode_value, encode_value, judged_array

TYPE_CHECKING = False  # typing itself takes a tenth of a program's start
if TYPE_CHECKING:
    from typing import Any, Literal

    from channel import Connection

    Role = Literal["named", "result", "iterator", "instance"]

"""How the test obtained an object: by a name, as a result or iterator, or by constructing it."""

OF_PROGRAM = "raised by the completion"  # key in the error's own dictionary

PLAIN = (str, bytes, int, float, complex, list, tuple, dict, set, frozenset, range)
PLAIN_METHODS = {name for kind in PLAIN for name in vars(kind)} | {"all", "any", "equals", "item"}


class RemoteProgram:
    """The judge's side of a connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.limit: str | None = None  # what the test asked for that no completion could give

    def ask(self, request: str, number: int, detail: Any = None) -> dict[str, Any]:
        try:
            self.connection.send([request, number, detail])
        except ValueError as error:
            self.limit = f"an argument of the tests: {error}"
            raise
        answer = self.connection.receive()
        if "raised" in answer:
            name, message = answer["raised"]
            error = _error(str(name))(str(message))
            vars(error)[OF_PROGRAM] = True
            raise error
        return answer

    def get(self, number: int, name: str, role: Role) -> Any:
        return self.decode(self.ask("get", number, name)["value"], role, name)

    def names(self) -> set[str]:
        names = self.decode(self.ask("names", 0)["value"], "result")
        return {name for name in names if type(name) is str}

    def decode(self, value: Any, role: Role, name: str = "") -> Any:
        def held(entry: dict[str, Any]) -> RemoteObject:
            ((kind, number),) = entry.items()
            if type(number) is not int or kind not in ("held", "iterator", "class"):
                raise ValueError("the message is not an encoded value")
            own_role: Role = "iterator" if kind == "iterator" and role == "result" else role
            return RemoteObject(self, number, own_role, name, kind == "class")

        return decode_value(value, held, judged_array)


class RemoteObject:
    """A proxy of an object in the completion's process. It equals only itself."""

    def __init__(
        self, program: RemoteProgram, number: int, role: Role, name: str, makes: bool
    ) -> None:
        self._program, self._number, self._role, self._name = program, number, role, name
        self._makes, self._ended = makes and name[:1].isupper(), False

    def __getattr__(self, name: str) -> Any:
        plain = self._role in ("result", "iterator") and name in PLAIN_METHODS
        if name.startswith("__") or plain:
            raise AttributeError(name)
        return self._program.get(self._number, name, "named")

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        return self._call(arguments, named)[0]

    def _call(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, list[Any]]:
        """The result, and the arguments after the call."""
        try:
            detail = [[_argument(a) for a in arguments], _argument(named)]
        except TypeError as error:
            self._program.limit = f"the tests pass what only their own process has: {error}"
            raise
        try:
            answer = self._program.ask("call", self._number, detail)
        except StopIteration as error:  # it would end a loop of the test
            if self._name == "__next__":
                raise
            raise RuntimeError("a function of the completion raised StopIteration") from error
        role: Role = "instance" if self._makes else "result"
        after = [self._program.decode(one, "result") for one in answer.get("arguments", [])]
        return self._program.decode(answer["value"], role), after

    def _special(self, name: str, *arguments: Any) -> Any:
        readable = self._role == "iterator" and name in ("__iter__", "__next__")
        if self._role != "instance" and not readable:
            raise TypeError(f"{name} of an object that the test did not construct")
        try:
            method = self._program.get(self._number, name, "named")
        except AttributeError as error:
            raise TypeError(f"an object of the completion has no {name}") from error
        return method(*arguments)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, RemoteObject) and "instance" in (self._role, other._role):
            self._program.limit = (
                "the tests compare two objects of the program, whose `==` stays in its own process"
            )
        return False

    __hash__ = object.__hash__

    def __len__(self) -> int:
        return self._special("__len__")

    def __getitem__(self, key: Any) -> Any:
        return self._special("__getitem__", key)

    def __contains__(self, item: Any) -> bool:
        return self._special("__contains__", item)

    def __str__(self) -> str:
        return self._special("__str__")

    def __bool__(self) -> bool:
        if self._role != "instance":
            return True  # as every object of Python that does not say otherwise
        return self._program.ask("truth", self._number)["value"] is True

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        try:
            return self._special("__next__")
        except StopIteration:
            self._ended = self._role == "iterator"
            raise

    def __iter__(self) -> Iterator[Any]:
        inner = self if self._role == "iterator" else self._special("__iter__")
        if isinstance(inner, RemoteObject) and inner._role == "result":
            inner._role = "iterator"
        while True:
            try:
                value = inner.__next__()
            except StopIteration:
                return
            yield value


def _argument(value: Any) -> Any:
    def held(thing: Any) -> dict[str, int]:
        if isinstance(thing, RemoteObject):
            return {"held": thing._number}
        raise TypeError(f"a {type(thing).__name__} cannot be passed to the completion")

    return encode_value(value, held)


def call_in_place(function: Any, /, *arguments: Any, **named: Any) -> Any:
    """Call a function whose result the test ignores, and keep its changes to the arguments."""
    if type(function) is not RemoteObject:
        return function(*arguments, **named)
    value, after = function._call(arguments, named)
    for mine, theirs in zip(arguments, after, strict=True):
        _replace_content(mine, theirs)
    return value


def _replace_content(mine: Any, theirs: Any) -> None:
    if isinstance(mine, list) and isinstance(theirs, list):
        mine[:] = theirs
    elif isinstance(mine, dict | set) and type(mine) is type(theirs):
        mine.clear()
        mine.update(theirs)


def came_from_program(error: BaseException) -> bool:
    """Whether the completion raised the error, in its own process."""
    return OF_PROGRAM in vars(error)


def _error(name: str) -> type[Exception]:
    """Python's own exception of that name, or a new exception type."""
    kind = vars(builtins).get(name)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind
    return type(name, (Exception,), {})
