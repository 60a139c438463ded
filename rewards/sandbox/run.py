"""Start a sandboxed process, wait no longer than allowed, and read what it has to say."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

SANDBOX_FOLDER = Path(__file__).parent
ENVIRONMENT = {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "HOME": "/tmp", "TMPDIR": "/tmp"}
START_SECONDS = 10.0  # seconds that a process may take to begin; they are not the code's


@dataclass(frozen=True)
class SandboxLimits:
    """Of one process, and of all that it starts.

    seconds    by the clock; its processor time is bounded by the next whole second
    memory     bytes of addresses
    written    bytes of one file or of what it says, and of all its files where it is shut in
    files      open at the same time
    processes  and threads
    """

    seconds: float = 5.0
    memory: int = 2**29
    written: int = 2**22
    files: int = 64
    processes: int = 32


@dataclass(frozen=True)
class ProgramResult:
    """`said` is standard output, `code` None where it was killed for the time that it took."""

    code: int | None
    said: str
    missing: tuple[str, ...]  # what could not be taken from it: see `confine`


def run_program(code: str, given: str, limits: SandboxLimits) -> ProgramResult:
    """Run a script on standard input."""
    with ExitStack() as stack:
        enter = stack.enter_context
        folder = enter(_folder(code))
        stdin = enter(_file(given.encode("utf-8", "surrogatepass")))
        stdout = enter(_file(b""))
        process, control = enter(_started("program", folder, limits, stdin, stdout))
        missing, _, ended = _heard(control, limits.seconds)
        status = process.wait() if ended else None
        stdout.seek(0)
        said = stdout.read(limits.written).decode("utf-8", "replace")
    return ProgramResult(status, said, missing)


def tests(code: str, given: Sequence[str], limits: SandboxLimits) -> tuple[list[bool], bool]:
    """Which tests pass, and whether time ran out. Tests are Python, run in a process of their own:
    see `calls`."""
    ours, theirs = socket.socketpair()
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(ours)
        enter(theirs)
        folders = enter(_folder(code)), enter(_folder(""))
        null = subprocess.DEVNULL
        questions = enter(_file(json.dumps(list(given)).encode()))
        _, first = enter(_started("serve", folders[0], limits, null, null, theirs))
        _, second = enter(_started("judge", folders[1], limits, questions, null, ours))
        ours.close()  # only theirs are left, so that either learns that the other has ended
        theirs.close()
        _heard(first, None)
        _, verdicts, ended = _heard(second, limits.seconds)
    passed = [chr(verdict) == "1" for verdict in verdicts]
    return passed + [False] * (len(given) - len(passed)), not ended


@contextmanager
def _file(content: bytes) -> Iterator[IO[bytes]]:
    """Without a name, to be read from its start."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file


@contextmanager
def _folder(code: str) -> Iterator[str]:
    """With the code in it. What is left there is removed, whatever its permissions."""
    folder = tempfile.mkdtemp(prefix="flowrl-")
    try:
        path = Path(folder, "code.py")
        path.write_text(code, encoding="utf-8", errors="surrogatepass")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _started(
    role: str,
    folder: str,
    limits: SandboxLimits,
    stdin: IO[bytes] | int,
    stdout: IO[bytes] | int,
    channel: socket.socket | None = None,
) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A process and what it says of itself; killed, with all that it started, at the end."""
    heard, control = os.pipe()
    settings: dict[str, Any] = {**asdict(limits), "folder": folder, "control": control}
    settings["paths"] = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    settings["channel"] = [] if channel is None else [channel.fileno()]
    command = [sys.executable, "-I", "-S", str(SANDBOX_FOLDER), role, json.dumps(settings)]
    process = subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, cwd=folder,
        env=ENVIRONMENT, start_new_session=True, pass_fds=[control, *settings["channel"]],
    )  # fmt: skip
    os.close(control)
    try:
        yield process, heard
    finally:
        os.close(heard)
        _kill(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):  # where all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _heard(control: int, seconds: float | None) -> tuple[tuple[str, ...], bytes, bool]:
    """What could not be taken from the process, what it said in `seconds` after that, and whether
    it ended in time. None waits for the first only."""
    heard, until, begun = b"", time.monotonic() + START_SECONDS, False
    while (left := until - time.monotonic()) > 0:
        if not select.select([control], [], [], left)[0]:
            break
        part = os.read(control, 2**16)
        if not part:
            return (*_split(heard), True)
        heard += part
        if not begun and b"\n" in heard:
            if seconds is None:
                break
            begun, until = True, time.monotonic() + seconds
    return (*_split(heard), False)


def _split(heard: bytes) -> tuple[tuple[str, ...], bytes]:
    line, end, rest = heard.partition(b"\n")
    if not end:
        raise RuntimeError(f"the sandbox does not start: {sys.executable} -I -S {SANDBOX_FOLDER}")
    return tuple(json.loads(line)), rest
