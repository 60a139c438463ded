"""Lines that stay at the bottom of a terminal while all other output scrolls above them.

The terminal's scroll region ends above the lines, so they and other output (a warning, a traceback,
from another process or a C library) never overwrite each other.
"""

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

NARROWEST, SHORTEST = 60, 5  # columns; rows above the lines
SECONDS = 1.0  # between two drawings
_SAVE, _RESTORE, _WHOLE, _CLEAR_LINE, _CLEAR_BELOW = "\x1b7", "\x1b8", "\x1b[r", "\x1b[2K", "\x1b[J"


def suits(stream: Any, height: int) -> bool:
    """Whether a text stream (notebooks have their own kinds) is a terminal with room for `height`
    lines, with this job in the foreground."""
    if not stream.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return False
    if (stream.encoding or "").lower().replace("-", "") != "utf8":
        return False
    try:
        file = stream.fileno()
    except OSError:  # a stand-in for a terminal, without a file
        return False
    return os.isatty(file) and in_front(file) and _has_room(os.get_terminal_size(file), height)


def in_front(file: int) -> bool:
    """Whether this job runs in its terminal's foreground; True if another session owns the
    terminal, as with a launcher's processes."""
    try:
        return os.tcgetpgrp(file) == os.getpgrp()
    except OSError:
        return True  # the terminal belongs to another session


def _has_room(size: os.terminal_size, height: int) -> bool:
    return size.columns >= NARROWEST and size.lines >= height + SHORTEST


class Footer:
    """The bottom `height` lines of a terminal, drawn every second by a thread from `lines(width)`.

    Nothing is drawn while the terminal is too small or another job is in its foreground. `close`
    clears the lines and resets the terminal; it runs at the latest when the interpreter exits.
    """

    def __init__(self, file: int, height: int, lines: Callable[[int], Sequence[str]]) -> None:
        self.file, self.height, self.lines = file, height, lines
        self._size: os.terminal_size | None = None  # of the terminal, while its region is set
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_drawing, daemon=True)

    def open(self) -> None:
        atexit.register(self.close)
        self._thread.start()

    def close(self) -> None:
        """Clear the lines and release all rows to other output. A second call does nothing."""
        self._ended.set()
        atexit.unregister(self.close)
        with self._lock, suppress(OSError):  # the terminal may be gone
            self._release()

    def draw(self) -> None:
        """Draw the lines once. OSError if the terminal is gone."""
        with self._lock:
            if self._ended.is_set() or not in_front(self.file):
                return
            size = os.get_terminal_size(self.file)
            if size != self._size:
                self._release()
                if not _has_room(size, self.height):
                    return
                self._reserve(size)
            top = size.lines - self.height + 1
            lines = [*self.lines(size.columns - 1), *[""] * self.height][: self.height]
            text = "".join(f"\x1b[{top + i};1H{_CLEAR_LINE}{line}" for i, line in enumerate(lines))
            self._write(f"{_SAVE}{text}{_RESTORE}")

    def _keep_drawing(self) -> None:
        with suppress(OSError):
            self.draw()
            while not self._ended.wait(SECONDS):
                self.draw()

    def _reserve(self, size: os.terminal_size) -> None:
        """Scroll until the cursor is above the lines, then end the scroll region there."""
        room, region = "\n" * self.height, f"\x1b[1;{size.lines - self.height}r"
        self._write(f"{room}\x1b[{self.height}A{_SAVE}{region}{_RESTORE}")
        self._size = size

    def _release(self) -> None:
        if self._size is None:
            return
        top = self._size.lines - self.height + 1
        self._write(f"{_SAVE}{_WHOLE}\x1b[{top};1H{_CLEAR_BELOW}{_RESTORE}")
        self._size = None

    def _write(self, text: str) -> None:
        unwritten = text.encode()
        while unwritten:  # one call as a rule, so that no other output comes in between
            unwritten = unwritten[os.write(self.file, unwritten) :]
