"""The command line. User errors print one sentence and exit with code 2; interruptions save
first."""

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import TextIO

from flowrl.blame import blamed_in_words
from flowrl.cli.command_table import COMMANDS
from flowrl.cli.ended import EndedBySignal, ended_in_order
from flowrl.cli.help import command_help, overview
from flowrl.cli.importing import collection_paused
from flowrl.cli.installed import check_torchvision
from flowrl.cli.restarts import supervised
from flowrl.errors import (
    WAYS_TO_WRITE,
    Stopped,
    UserError,
    WaitEnded,
    messages_name,
    printable,
    write_fault,
)
from flowrl.paths import find
from flowrl.session.output import outlive_terminal

_HELP = ("-h", "--help", "help")
NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
# errors of a file or its disk, not of the program
OF_THE_DISK = {*WAYS_TO_WRITE, *NO_SPACE}
# commands that import no transformers
WITHOUT_MODELS = ("doctor", "suites", "path", "schema", "completion")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line, by default this process's arguments, and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    open_closed()
    # Waiting threads spin for at most this long. By default they spin on, and where another program
    # needs a core a step takes thirty times as long; on an idle machine this costs nothing.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        try:
            code = exit_code(words)
        finally:
            flush()
    except BrokenPipeError:  # the reader has closed the pipe: `flowrl suites | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no error at exit either
        code = 128 + signal.SIGPIPE
    except OSError as error:  # of standard output, such as a file on a full disk
        if error.errno is None or error.filename is not None:  # of something else: a bug
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"flowrl: standard output: {str(error.strerror).lower()}", file=sys.stderr)
        code = 3
    sys.exit(code)


def flush() -> None:
    """Flush standard output, if a user's code has not taken it away."""
    stream: TextIO | None = sys.stdout
    if stream is not None:
        stream.flush()


def open_closed() -> None:
    """Open what a caller has closed (`>&-`), so that no file of a run becomes standard output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):  # letters that a terminal lacks, as in errors
        sys.stdout.reconfigure(errors="backslashreplace")


def exit_code(words: list[str]) -> int:
    """Run a command and return its exit code; docs/interruptions.md has the table."""
    named = _existing(words)
    try:
        with blamed_in_words():
            return _run(words)
    except UserError as error:
        print(f"flowrl: {printable(str(error))}", file=sys.stderr)
        if isinstance(error.__cause__, FileNotFoundError) and (gone := _removed(named)):
            print(f"flowrl: {printable(gone)}", file=sys.stderr)
        return 3 if isinstance(error, Stopped) else 2
    except OSError as error:
        message = _of_the_disk(error)
        if message is None and isinstance(error, FileNotFoundError):
            message = _removed(named)
        if message is None:
            raise
        print(f"flowrl: {printable(message)}", file=sys.stderr)
        return 3 if error.errno in NO_SPACE else 2
    except KeyboardInterrupt as error:
        trains = words[:1] == ["train"]
        text = "stopped at once; the last checkpoint is complete" if trains else "stopped at once"
        cause: BaseException | None = error
        if isinstance(error, WaitEnded):
            text, cause = str(error), error.__cause__
        print(f"\nflowrl: {text}", file=sys.stderr)
        return 128 + (cause.number if isinstance(cause, EndedBySignal) else signal.SIGINT)


def _existing(words: Sequence[str]) -> list[str]:
    """Words of a command line, and values of its options, that name files or folders."""
    values = [word.partition("=")[2] if word.startswith("--") else word for word in words]
    return [value for value in values if os.path.lexists(value)]


def _removed(named: Sequence[str]) -> str | None:
    """A sentence if one of these files or folders no longer exists."""
    gone = next((name for name in named if not os.path.lexists(name)), None)
    if gone is None:
        return None
    return (
        f"{gone[:200]} is no longer there: it was moved, renamed or removed while this command "
        "used it; give its new place"
    )


def _of_the_disk(error: OSError) -> str | None:
    """A sentence for an error of a file's name, its disk or the working folder; None for others."""
    if isinstance(error, FileNotFoundError) and error.filename is None and not _has_folder():
        return "the working folder no longer exists: change to another one"
    if error.errno not in OF_THE_DISK:
        return None
    file = error.filename2 or error.filename
    name = "standard output or a file" if file is None else str(file)
    return f"{name[:200]}: {write_fault(error)}"


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _run(words: list[str]) -> int:
    if not words or words[0] in _HELP:
        print(overview())
        return 0 if words else 2
    if words[0] in ("--version", "version"):
        print(f"flowrl {version()}")
        return 0
    name, *rest = words
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(COMMANDS)}"
        raise UserError(f"{name[:100]!r} is not a command; {hint}")
    if words[:2] == ["completion", "words"]:  # the words of another command follow, --help too
        return command(name)(rest)
    if set(rest) & set(_HELP[:2]):
        print(command_help(name))
        return 0
    if name == "train":
        outlive_terminal()
        rest, code = supervised(rest)
        if code is not None:
            return code
    with ended_in_order(), messages_name(name):
        return command(name)(rest)


def version() -> str:
    """Version of the installed package, or of the source tree if it is not installed."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("flowrl")
    except PackageNotFoundError:
        return "from the source tree, which is not installed"


def path_command(arguments: Sequence[str]) -> int:
    """`path NAME`: print the path of one of flowrl's files, for other programs; a user's file of
    that name takes precedence."""
    if len(arguments) != 1:
        raise UserError("path: name one file, such as configs/accelerate/ddp.yaml")
    path = find(arguments[0])
    if not path.exists():
        raise UserError(f"path: {arguments[0][:200]}: no such file, neither here nor in flowrl")
    print(path)
    return 0


def command(name: str) -> Callable[[list[str]], int]:
    """The function of a command. Its module is imported only once the command is known, because
    importing torch takes seconds."""
    if name not in WITHOUT_MODELS:
        check_torchvision()
        # read when they are imported, which warns of packages that flowrl does without
        for library in ("TRANSFORMERS", "DIFFUSERS"):
            os.environ.setdefault(f"{library}_VERBOSITY", "error")
    module, _, function = COMMANDS[name].call.partition(":")
    with collection_paused():
        return getattr(import_module(module), function)
