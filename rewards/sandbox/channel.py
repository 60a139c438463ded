"""Messages between two processes: JSON, each after its length in 4 bytes."""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False  # typing itself takes a tenth of a program's start
if TYPE_CHECKING:
    from typing import Any, Protocol

    class Connection(Protocol):
        def send(self, message: Any) -> None: ...

        def receive(self) -> Any: ...


MAX_MESSAGE = 2**24  # bytes


class Gone(BaseException):
    """The other process has ended. Tests cannot catch this with `except Exception`."""


class Channel:
    """A connection over an open file, such as one end of a socket pair, or over one for reading and
    another for writing."""

    def __init__(self, file: int, out: int | None = None) -> None:
        self.file, self.out = file, file if out is None else out

    def send(self, message: Any) -> None:
        body = json.dumps(message).encode()
        if len(body) > MAX_MESSAGE:
            raise ValueError("the value is too large to send to the other process")
        left = memoryview(len(body).to_bytes(4, "little") + body)
        while left:
            try:
                left = left[os.write(self.out, left) :]
            except OSError as error:
                raise Gone from error

    def receive(self) -> Any:
        size = int.from_bytes(self._exactly(4), "little")
        if size > MAX_MESSAGE:
            raise Gone
        return json.loads(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = os.read(self.file, min(size - len(parts), 2**16))
            except ConnectionResetError as error:  # it ended with our message unread
                raise Gone from error
            if not part:
                raise Gone
            parts += part
        return bytes(parts)
