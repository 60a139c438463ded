"""Start a sandboxed process, wait no longer than allowed, and read its results."""

import functools
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from rewards.sandbox.cgroup import delegated_folder, end_group, group_name

SANDBOX_FOLDER = Path(__file__).parent
PACKAGE_FOLDERS = ("site-packages", "dist-packages")  # by name, as pip and Debian call them
ENVIRONMENT = {
    "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "HOME": "/tmp", "TMPDIR": "/tmp",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
}  # fmt: skip
START_SECONDS = 10.0  # seconds that a process may take to begin; they are not the code's
END_SECONDS = 10.0  # seconds that the kernel may take to end all processes of a program


@dataclass(frozen=True)
class SandboxLimits:
    """Limits for one process and everything that it starts.

    seconds    wall-clock time; CPU time is limited to the next whole second
    memory     bytes of address space per process, and of total resident memory
    written    bytes bytes of one file or of the output, and of all files together if isolated
    files      maximum number of open files
    processes  and threads
    """

    seconds: float = 5.0
    memory: int = 2**29
    written: int = 2**22
    files: int = 64
    processes: int = 32


@dataclass(frozen=True)
class ProgramResult:
    """Result of a run: `output` is standard output; `code` is None if the process was killed for
    its time."""

    code: int | None
    output: str
    missing: tuple[str, ...]  # protections that this system does not have: see `confine`


def run_program(code: str, input_text: str, limits: SandboxLimits) -> ProgramResult:
    """Run a script on standard input."""
    with ExitStack() as stack:
        enter = stack.enter_context
        folder = enter(make_folder(code))
        stdin = enter(_file(input_text.encode("utf-8", "surrogatepass")))
        stdout = enter(_file(b""))
        # the program, another user, may open them by their names in /dev as well
        os.fchmod(stdin.fileno(), 0o444)
        os.fchmod(stdout.fileno(), 0o666)
        program = enter(started("program", folder, limits, stdin, stdout))
        missing, _, ended = read_control(program.reports, limits.seconds)
        status = program.process.wait() if ended else None
        stdout.seek(0)
        output = stdout.read(limits.written).decode("utf-8", "replace")
    return ProgramResult(status, output, missing)


class TestsRun(NamedTuple):
    """passed    of each test
    late      whether time ran out
    limits    tests that did not pass, by number, which this judge cannot run for any program: why
    """

    passed: list[bool]
    late: bool
    limits: dict[int, str]


def run_tests(code: str, tests: Sequence[str], limits: SandboxLimits) -> TestsRun:
    """Run Python tests in a separate process, which calls the program's functions."""
    ours, theirs = socket.socketpair()
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(ours)
        enter(theirs)
        folders = enter(make_folder(code)), enter(make_folder(""))
        null = subprocess.DEVNULL
        word = secrets.token_hex(16)
        questions = enter(_file(json.dumps([word, *tests]).encode()))
        program = enter(started("serve", folders[0], limits, null, null, theirs))
        judge = enter(started("judge", folders[1], limits, questions, null, ours))
        ours.close()  # only the processes hold the ends, so each learns when the other has ended
        theirs.close()
        read_control(program.reports, None)
        # with the last verdict there the judge need not end by itself
        _, verdicts, ended = read_control(judge.reports, limits.seconds, lines=len(tests))
        program.end()  # both at once
        judge.end()
    passed, reasons = read_verdicts(verdicts, word, len(tests))
    return TestsRun(passed, not ended, reasons)


def read_verdicts(written: bytes, word: str, tests: int) -> tuple[list[bool], dict[int, str]]:
    """Whether each test passed, from what the judge wrote, and why it has no verdict on some."""
    read = _verdicts(written, word, tests)
    passed = [verdict is True for verdict in read] + [False] * (tests - len(read))
    return passed, {number: reason for number, reason in enumerate(read) if isinstance(reason, str)}


def _verdicts(written: bytes, word: str, most: int) -> list[bool | str]:
    """The judge's verdicts, each a line with its secret word and 1 or 0, or 2 and a reason. A line
    without this form was written by other code, and verdicts after it do not count."""
    outcomes: list[bool | str] = []
    for line in written.split(b"\n")[:-1][:most]:
        start, reason = f"{word} 2 ".encode(), None
        if line.startswith(start):
            with suppress(ValueError):
                reason = json.loads(line.removeprefix(start))
        if not isinstance(reason, str):
            if line not in (f"{word} {verdict}".encode() for verdict in (0, 1)):
                break
            reason = line.endswith(b" 1")
        outcomes.append(reason)
    return outcomes


def weak_rows(
    rows: Sequence[Sequence[str]], seconds: float, limits: SandboxLimits
) -> list[str | None]:
    """Find the rows whose Python tests pass for a program that solves nothing, and name that
    program.

    The list is shorter than `rows` if `seconds` were not enough for all.
    """
    limits = replace(limits, seconds=seconds + 1)
    with ExitStack() as stack:
        folder = stack.enter_context(make_folder(""))
        stdin = stack.enter_context(_file(json.dumps([list(row) for row in rows]).encode()))
        audit = stack.enter_context(started("audit", folder, limits, stdin, subprocess.DEVNULL))
        _, lines, _ = read_control(audit.reports, limits.seconds)
    return [json.loads(line) for line in lines.splitlines(keepends=True) if line.endswith(b"\n")]


class Sandbox(Protocol):
    """Something that runs untrusted code: this module, or `external.External`."""

    def run_program(self, code: str, input_text: str, limits: SandboxLimits) -> ProgramResult: ...

    def run_tests(self, code: str, tests: Sequence[str], limits: SandboxLimits) -> TestsRun: ...

    def weak_rows(
        self, rows: Sequence[Sequence[str]], seconds: float, limits: SandboxLimits
    ) -> list[str | None]: ...


@contextmanager
def _file(content: bytes) -> Iterator[IO[bytes]]:
    """An unnamed file with this content, positioned at its start."""
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file


@contextmanager
def make_folder(code: str) -> Iterator[str]:
    """A folder with the code in it. It is removed with its content, whatever its permissions."""
    folder, owner = tempfile.mkdtemp(prefix="flowrl-"), os.getpid()
    try:
        path = Path(folder, "program.py")
        path.write_text(code, encoding="utf-8", errors="surrogatepass")
        yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)


def package_folders() -> list[str]:
    """Folders of installed packages in Python's search order.

    These are the environment's own folders, and others that it can import from: a base
    environment's, or those of `pip install --user`. Source folders on the path are left out.
    """
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    seen = [path for path in sys.path if Path(path).name in PACKAGE_FOLDERS]
    return list(dict.fromkeys([*seen, *installed]))


@dataclass(frozen=True)
class SandboxProcess:
    """A keeper with its program. It reads `held`'s other end and writes what `reports` reads."""

    process: "subprocess.Popen[bytes]"
    held: int
    reports: int

    def end(self) -> None:
        """Have the keeper end its program. A byte says so, since another process of the run may
        hold a copy of the pipe."""
        with suppress(BrokenPipeError):  # it has ended
            os.write(self.held, b".")

    def wait(self) -> None:
        """Wait until all processes are gone: the keeper then closes its report file."""
        until = time.monotonic() + END_SECONDS
        while (left := until - time.monotonic()) > 0:
            if not select.select([self.reports], [], [], left)[0]:
                continue
            if not os.read(self.reports, 2**16):
                break
        else:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            warnings.warn(
                f"the sandbox's process {self.process.pid} did not end its program within "
                f"{END_SECONDS:g} s and was killed",
                stacklevel=2,
            )
        self.process.wait()


@contextmanager
def started(
    role: str,
    folder: str,
    limits: SandboxLimits,
    stdin: IO[bytes] | int,
    stdout: IO[bytes] | int,
    channel: socket.socket | None = None,
) -> Iterator[SandboxProcess]:
    """A process and its report file; at the end the process has ended, with all that it started."""
    reports, control = os.pipe()
    lifeline, held = os.pipe()
    settings: dict[str, Any] = {**asdict(limits), "folder": folder, "control": control}
    settings |= {"lifeline": lifeline, "most_seconds": limits.seconds + 3 * START_SECONDS}
    settings["paths"] = package_folders()
    settings["group"] = _new_group()
    settings["channel"] = [] if channel is None else [channel.fileno()]
    command = [sys.executable, "-I", "-S", str(SANDBOX_FOLDER), role, json.dumps(settings)]
    process = subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, cwd=folder, env=ENVIRONMENT,
        start_new_session=True, pass_fds=[control, lifeline, *settings["channel"]],
    )  # fmt: skip
    os.close(control)
    os.close(lifeline)
    keeper = SandboxProcess(process, held, reports)
    owner = os.getpid()
    try:
        yield keeper
    finally:
        if os.getpid() == owner:  # a fork that drops its copy of this ends nothing
            keeper.end()
            os.close(held)
            keeper.wait()
            os.close(reports)
            if settings["group"] is not None:  # of a keeper that was killed itself
                end_group(settings["group"])


@functools.cache
def _groups() -> str | None:
    return delegated_folder() if sys.platform == "linux" else None


def _new_group() -> str | None:
    folder = _groups()
    return None if folder is None else group_name(folder, secrets.token_hex(6))


def read_control(
    control: int,
    seconds: float | None,
    start: float = START_SECONDS,
    lines: int | None = None,
) -> tuple[tuple[str, ...], bytes, bool]:
    """Missing protections, the text that the process wrote within `seconds` afterwards, and whether
    it ended, or wrote so many lines. RuntimeError if it does not begin within `start` seconds.

    With None, wait only for the protections.
    """
    text, until, begun = b"", time.monotonic() + start, False
    while (left := until - time.monotonic()) > 0:
        if not select.select([control], [], [], left)[0]:
            break
        part = os.read(control, 2**16)
        if not part:
            return (*_split(text), True)
        text += part
        if not begun and b"\n" in text:
            if seconds is None:
                break
            begun, until = True, time.monotonic() + seconds
        if begun and lines is not None and text.count(b"\n") > lines:
            return (*_split(text), True)
    return (*_split(text), False)


def _split(text: bytes) -> tuple[tuple[str, ...], bytes]:
    line, end, rest = text.partition(b"\n")
    if not end:
        raise RuntimeError(
            f"the sandbox does not start; run `{sys.executable} -I -S {SANDBOX_FOLDER}` to see why"
        )
    return tuple(json.loads(line)), rest
