"""Errors that a user can fix, and code that runs because of an error."""

import errno
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """An error in settings, files or arguments: one sentence with the place and the fix.

    The command line prints it without a traceback and exits with code 2.
    """


_made: ContextVar[str] = ContextVar("made_call", default="flowrl")


def made_call() -> str:
    """The call that a user has made, such as flowrl.train, or the command, for messages about its
    arguments."""
    return _made.get()


def options_place() -> str:
    """The place of options for messages: the command line, or the call that has them in a list."""
    call = made_call()
    return call if call.startswith("flowrl.") else "command line"


@contextmanager
def messages_name(call: str) -> Iterator[None]:
    """Messages of the body name this call as the one that was made."""
    token = _made.set(call)
    try:
        yield
    finally:
        _made.reset(token)


@contextmanager
def in_words(words: Mapping[str, str]) -> Iterator[None]:
    """Raise a UserError of the body with these words in place of others: a part that several
    commands and runs use names what one of them has."""
    try:
        yield
    except UserError as error:
        said = str(error)
        for word, other in words.items():
            said = said.replace(word, other)
        error.args = (said,)
        raise


def printable(text: str) -> str:
    """The text with escapes in the place of characters that a terminal would obey, such as those
    that begin a title, clear the screen or turn the direction of writing. Lines stay lines."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


# control characters but the ends of lines and tabs, and what turns the direction of writing
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def terminal_text(text: str) -> str:
    """The text with escapes in the place of characters that a terminal would obey. Unlike
    `printable` it keeps all spaces and joiners, which the texts of many languages have."""
    return _OBEYED.sub(lambda match: repr(match[0])[1:-1], text)


class FolderInUse(UserError):
    """A run's folder that another process begins or trains at this moment: `reason` says so, and
    the sentence also what to do."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}{remedy}")
        self.reason, self.remedy = reason, remedy


class WaitEnded(KeyboardInterrupt):
    """Ctrl-C, or a signal, its cause, while a process waited and had not begun its own work."""


class Stopped(UserError):
    """A run that ended early; its last checkpoint is complete. Exit code 3."""


class UnusableCheckpoint(UserError):
    """A checkpoint that a run cannot go on from: damaged, of another model, or not finite. Its
    message has the whole way on."""


class NotFiniteError(UserError):
    """NaN or infinity from which a run cannot recover. A run turns it into `Stopped`, exit
    code 3."""


@contextmanager
def feature_files(folder: str, feature: str) -> Iterator[None]:
    """Import files of features in this folder. UserError, in a sentence, where they are not
    installed; `feature` asks for them."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(folder):
            raise
        raise UserError(
            f"this run needs the feature {feature}, and this installation of flowrl lacks "
            f"{error.name}: install flowrl again, or leave out the setting that asks for it"
        ) from error


def after(first: BaseException, do: Callable[[], T], otherwise: T) -> T:
    """The result of `do`, which explains or cleans up after an error; `otherwise` if it fails.

    Such code runs only while something else fails, so its own faults are found late. They become a
    note of the first error, and never take its place.
    """
    try:
        return do()
    except Exception as second:
        first.add_note(f"while this error was handled: {type(second).__name__}: {second}")
        return otherwise


WAYS_TO_WRITE = {  # what a user can do about an error of a file's place
    errno.EACCES: "change its rights, or choose another place",
    errno.EPERM: "change its rights, or choose another place",
    errno.EROFS: "its disk can only be read: choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a part of the path is a file: choose another place",
    errno.EISDIR: "a folder has this name: choose another one",
    errno.ELOOP: "a link leads back to itself: remove it, or choose another place",
}


def write_fault(error: OSError | ValueError) -> str:
    """Why a file or a folder cannot be written, and what a user can do, as a clause."""
    if isinstance(error, ValueError):  # a name with NUL
        return f"{error}: choose another name"
    if isinstance(error, FileNotFoundError):
        return (
            "a folder of its path is missing, or the working folder was removed: create it, or "
            "choose another place"
        )
    said = (error.strerror or str(error)).lower()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{said}: make room, or choose another disk"
    return f"{said}: {WAYS_TO_WRITE.get(error.errno or 0, 'choose another place')}"
