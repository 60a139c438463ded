"""Programs in a sandbox of the user's own: the same judge, over standard input and output alone.

The user's configuration names a command that starts Python somewhere else: in bubblewrap, gVisor, a
container or a virtual machine. flowrl adds the arguments that make this Python read its part (a
program, or the judge) from standard input. Nothing else is shared: no file, no folder, no version
of Python. What keeps a program in, and what ends it, is the command's own.
"""

import json
import os
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from rewards.configuration import configuration_file, configured_section, passed_on
from rewards.sandbox.run import (
    END_SECONDS,
    SANDBOX_FOLDER,
    START_SECONDS,
    ProgramResult,
    SandboxLimits,
    TestsRun,
    read_verdicts,
)

# sent in this order: each imports only those before it
SENT_SOURCES = ("channel", "values", "mappings", "program", "remote", "judge", "weak_tests", "away")
BOOT = """\
import os
def exactly(size):
    found = b""
    while len(found) < size:
        part = os.read(0, size - len(found))
        if not part: raise SystemExit(97)
        found += part
    return found
exec(exactly(int(exactly(8))))
"""
MAX_FRAME = 2**24 + 2**10  # bytes
ASKED, WRITTEN = b"q", b"v"  # kinds of the judge's frames


class Late(Exception):
    """Time ran out."""


class Ended(Exception):
    """A process has closed its end."""


def configured() -> "External":
    """The external sandbox of the user's configuration.

    ValueError without one, for a file that others can write, and for one of another form.
    """
    file, section = configuration_file(), configured_section("sandbox")
    example = 'command = ["bwrap", ..., "python3"] below [sandbox]'
    if section is None:
        raise ValueError(
            f"isolation: external needs {example} in your configuration, {file}: see "
            "docs/code_rewards.md"
        )
    command = section.get("command")
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    if not words or words != command or set(section) != {"command"}:
        raise ValueError(f"{file}: write {example}, a list of words, and nothing else")
    return External(tuple(words))


@dataclass(frozen=True)
class External:
    """A sandbox behind a command, which must end with a Python of version 3.11 or later."""

    command: tuple[str, ...]

    def check(self) -> None:
        """ValueError if the command does not run a program."""
        word = secrets.token_hex(8)
        code = f"print(input() + {word!r}[::-1])"
        result = self.run_program(code, "from here ", SandboxLimits())
        if result.code != 0 or result.output.strip() != f"from here {word[::-1]}":
            raise ValueError(
                f"isolation: external: `{' '.join(self.command)}` does not run a Python program: "
                f"it ended with code {result.code} and wrote {result.output[-200:]!r}; it says: "
                f"{self._complaint()!r}"
            )

    def _complaint(self) -> str:
        """Read what the command writes to standard error without a program."""
        try:
            done = subprocess.run(
                [*self.command, "-I", "-c", ""], env=passed_on(), stdin=subprocess.DEVNULL,
                capture_output=True, timeout=START_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)[-300:]
        return done.stderr[-300:].decode("utf-8", "replace")

    def run_program(self, code: str, input_text: str, limits: SandboxLimits) -> ProgramResult:
        """Run a script on standard input."""
        content = input_text.encode("utf-8", "surrogatepass")
        with self._started("program", limits, code) as process:
            try:
                process.begin()
                until = time.monotonic() + limits.seconds
                output = process.exchanged(content, limits.written, until)
                status = process.ended(until)
            except Late:
                output, status = bytes(process.read), None
            except Ended:  # before it began
                output, status = b"", process.ended(time.monotonic() + END_SECONDS)
        text = output[: limits.written].decode("utf-8", "replace")
        return ProgramResult(status, text, ())

    def run_tests(self, code: str, tests: Sequence[str], limits: SandboxLimits) -> TestsRun:
        """Run Python tests in a process of their own. It asks for the program's functions here,
        and the question is handed on."""
        word, written, late = secrets.token_hex(16), bytearray(), False
        questions = json.dumps([word, *tests])
        with (
            self._started("serve", limits, code) as program,
            self._started("judge", limits, questions) as judge,
        ):
            try:
                program.begin()
                judge.begin()
                _relay(program, judge, written, time.monotonic() + limits.seconds)
            except Late:
                late = True
            except Ended:
                pass
        passed, reasons = read_verdicts(bytes(written), word, len(tests))
        return TestsRun(passed, late, reasons)

    def weak_rows(
        self, rows: Sequence[Sequence[str]], seconds: float, limits: SandboxLimits
    ) -> list[str | None]:
        """Find the rows whose tests pass for a program that solves nothing: see `run.weak_rows`."""
        limits, output = replace(limits, seconds=seconds + 1), bytearray()
        with self._started("audit", limits, json.dumps([list(row) for row in rows])) as audit:
            try:
                audit.begin()
                until = time.monotonic() + limits.seconds
                while True:
                    output += audit.frame(until)[1]
            except (Late, Ended):
                pass
        lines = output.splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    @contextmanager
    def _started(self, role: str, limits: SandboxLimits, content: str) -> Iterator["_Process"]:
        """A process with its role and what it works on; at the end it has ended."""
        word = secrets.token_hex(16)
        settings: dict[str, Any] = {**asdict(limits), "role": role, "word": word}
        sources = {name: (SANDBOX_FOLDER / f"{name}.py").read_text() for name in SENT_SOURCES}
        body = json.dumps([settings, sources, content]).encode("utf-8", "surrogatepass")
        entry = b"import json\nload_away(*json.loads(exactly(int(exactly(12)))))\n"
        loader = (SANDBOX_FOLDER / "load_away.py").read_bytes() + entry
        first = b"%8d%b%12d%b" % (len(loader), loader, len(body), body)
        try:
            process = subprocess.Popen(
                [*self.command, "-I", "-c", BOOT], env=passed_on(), bufsize=0,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ValueError(
                f"isolation: external: {self.command[0]} of {configuration_file()} cannot be "
                f"started: {error}"
            ) from error
        started = _Process(process, first, f"{word}\n".encode())
        try:
            yield started
        finally:
            started.end()


class _Process:
    """One start of the command. All reading and writing ends at a time: Late, or Ended."""

    def __init__(self, process: "subprocess.Popen[bytes]", first: bytes, ready: bytes) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process, self.first, self.ready = process, first, ready
        self.into, self.out = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self.into, False)
        self.read = bytearray()  # and not yet taken

    def begin(self) -> None:
        """Send what it works on, and wait until it says that it begins."""
        until = time.monotonic() + START_SECONDS
        self.send(self.first, until)
        if self._exactly(len(self.ready), until) != self.ready:
            raise Ended

    def send(self, content: bytes, until: float) -> None:
        left = memoryview(content)
        while left:
            _, ready, _ = select.select([], [self.into], [], _left(until))
            if ready:
                left = left[self._written(left) :]

    def frame(self, until: float) -> tuple[bytes, bytes]:
        """The kind and the content of the next message of the judge."""
        kind = self._exactly(1, until)
        return kind, self.message(until)

    def message(self, until: float) -> bytes:
        """The next message of `channel.Channel`, without its length."""
        size = int.from_bytes(self._exactly(4, until), "little")
        if size > MAX_FRAME:
            raise Ended
        return self._exactly(size, until)

    def exchanged(self, content: bytes, most: int, until: float) -> bytes:
        """Send content while reading to the end, or to more than `most` bytes."""
        left = memoryview(content)
        while len(self.read) <= most:
            if not left and not self.process.stdin.closed:  # type: ignore[union-attr]
                self.process.stdin.close()  # type: ignore[union-attr]
            wants = [self.into] if left else []
            readable, writable, _ = select.select([self.out], wants, [], _left(until))
            if writable:
                try:
                    left = left[self._written(left) :]
                except Ended:  # it reads no further
                    left = left[:0]
            if readable and not self._more():
                break
        return bytes(self.read)

    def ended(self, until: float) -> int:
        """The exit code of the command, as a shell would give it. Late if it goes on."""
        try:
            code = self.process.wait(_left(until))
        except subprocess.TimeoutExpired as error:
            raise Late from error
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """End the command. It is asked first: one that is killed may leave what it started."""
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        for how in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, how)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(END_SECONDS / 2)
        self.process.wait()

    def _written(self, content: memoryview) -> int:
        try:
            return os.write(self.into, content[: 2**16])
        except BlockingIOError:
            return 0
        except BrokenPipeError as error:
            raise Ended from error

    def _exactly(self, size: int, until: float) -> bytes:
        while len(self.read) < size:
            if select.select([self.out], [], [], _left(until))[0] and not self._more():
                raise Ended
        part = bytes(self.read[:size])
        del self.read[:size]
        return part

    def _more(self) -> bool:
        part = os.read(self.out, 2**16)
        self.read += part
        return bool(part)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise Late
    return left


def _relay(program: _Process, judge: _Process, written: bytearray, until: float) -> None:
    """Hand the judge's questions to the program and its answers back, until the judge ends; keep
    what the judge writes. Once the program has ended, the judge's input ends."""
    while True:
        kind, content = judge.frame(until)
        if kind == WRITTEN:
            written += content
            continue
        try:
            program.send(len(content).to_bytes(4, "little") + content, until)
            answer = program.message(until)
            judge.send(len(answer).to_bytes(4, "little") + answer, until)
        except Ended:
            judge.process.stdin.close()  # type: ignore[union-attr]
