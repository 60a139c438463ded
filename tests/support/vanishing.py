"""A folder that vanishes, or a disk that fails, in the middle of what reads it."""

import builtins
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# the calls by which Python code looks into a folder; those of libraries in C lie between them
LOOKS = (
    (builtins, "open"),
    (io, "open"),
    (os, "open"),
    (os, "stat"),
    (os, "listdir"),
    (os, "scandir"),
)


@dataclass
class Looks:
    """Counts the looks into a folder, and calls `do` before one of them, or before it and all that
    follow.

    at  the number of that look, from 1; 0 only counts
    """

    folder: Path
    do: Callable[[Any], None]
    at: int = 0
    lasting: bool = False
    count: int = 0

    def seen(self, path: Any) -> None:
        if not isinstance(path, str | os.PathLike):
            return
        if not os.fspath(path).startswith(str(self.folder)):
            return
        self.count += 1
        if self.count == self.at or (self.lasting and self.at and self.count > self.at):
            self.do(path)


@contextmanager
def looking(looks: Looks) -> Iterator[Looks]:
    """Count the looks of the body, and of what it calls."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in LOOKS:
            patch.setattr(module, name, _watched(getattr(module, name), looks))
        yield looks


def _watched(call: Callable[..., Any], looks: Looks) -> Callable[..., Any]:
    def watched(path: Any = ".", *rest: Any, **named: Any) -> Any:
        looks.seen(path)
        return call(path, *rest, **named)

    return watched


def vanishes(folder: Path) -> Callable[[Any], None]:
    """Remove the folder."""
    return lambda _: shutil.rmtree(folder)


def fails(number: int) -> Callable[[Any], None]:
    """Raise the error of a disk or of rights for the file that is looked at."""

    def failing(path: Any) -> None:
        raise OSError(number, os.strerror(number), os.fspath(path))

    return failing
