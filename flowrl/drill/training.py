"""Trainings as processes that a drill started: output, end, and signals to them alone."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from flowrl.drill.same_end import trained_until
from flowrl.launching.own_python import python_environment
from flowrl.session.notices import NOTICES_VARIABLE

POLL_SECONDS = 0.02
KILLED_SECONDS = 10.0  # until a killed process has given back its memory


class Overdue(Exception):
    """A training did neither end nor go on within the drill's limit."""


@dataclass
class DrilledProgram:
    """The environment whose flowrl is drilled.

    python   its interpreter
    own      whether it is this one, whose source tree need not be installed
    state    the folder for flowrl's state, so that the user's is not written; a launcher's logs lie
             beside it
    processes  of torchrun; 1: without a launcher
    """

    python: str
    own: bool
    state: Path
    processes: int = 1

    def command(self, words: Sequence[str], restarts: int = 0) -> list[str]:
        if self.processes == 1:
            more = ["--restarts", str(restarts)] if restarts else []
            return [self.python, "-m", "flowrl", "train", *words, *more]
        return [
            self.python, "-m", "torch.distributed.run", "--nproc-per-node", str(self.processes),
            "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
            # without a folder torch makes one for its logs, and leaves it
            "--max-restarts", str(restarts), "--log-dir", str(self.state.with_name("launcher")),
            "-m", "flowrl", "train", *words,
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        variables = python_environment(self.own)
        variables |= {"FLOWRL_STATE": str(self.state), "PYTHONUNBUFFERED": "1"}
        variables[NOTICES_VARIABLE] = "off"  # of what happens to copies
        if self.processes > 1:
            variables.setdefault("OMP_NUM_THREADS", "1")
        return variables


@dataclass
class Training:
    """A start of a run. Only what it started is signalled, by a file of the process that stays the
    same process (pidfd)."""

    process: "subprocess.Popen[bytes]"
    folder: Path
    output: Path
    seen: dict[int, float] = field(default_factory=dict)  # its processes and their time of start

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self, seconds: float) -> int:
        """The exit code, as a shell would give it. Overdue if it goes on."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise Overdue(f"it did not end within {seconds:.0f} s") from error
        return code if code >= 0 else 128 - code

    def until(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait for something. False if the training ended first; Overdue if neither came."""
        end = time.monotonic() + seconds
        while not ready():
            if not self.running():
                return ready()
            if time.monotonic() > end:
                raise Overdue(f"nothing happened within {seconds:.0f} s")
            time.sleep(POLL_SECONDS)
        return True

    def workers(self) -> list[psutil.Process]:
        """The processes that train: the ranks of a launcher, the child of a supervisor, or the
        process itself. Earlier attempts have ended."""
        processes = []
        with suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    words = process.cmdline()
                    if "flowrl" in words and "train" in words:
                        processes.append(process)
        ranks = [p for p in processes if not any(c in processes for c in p.children())]
        with suppress(psutil.Error):
            return ranks or [psutil.Process(self.process.pid)]
        return []

    def signal(self, number: int, process: psutil.Process | None = None) -> None:
        """Signal the process that was started, or one of its own."""
        pid = self.process.pid if process is None else process.pid
        if process is None and not self.running():
            return
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            # now the number cannot become another's: is it still the one that was meant?
            if process is None or process.is_running():
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)

    def end(self) -> None:
        """Kill everything that it started and that is alive."""
        family = self._stopped()
        for process in family:
            self.signal(signal.SIGKILL, process)
        self.signal(signal.SIGKILL)
        self.process.wait()
        end = time.monotonic() + KILLED_SECONDS
        while any(map(runs, family)) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    def _stopped(self) -> list[psutil.Process]:
        """All that it started, stopped, so that none of them starts another one meanwhile."""
        family: list[psutil.Process] = []
        self.signal(signal.SIGSTOP)
        with suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            while new := [child for child in root.children(recursive=True) if child not in family]:
                for process in new:
                    self.signal(signal.SIGSTOP, process)
                family += new
        return family

    def passed(self, iteration: int) -> bool:
        return trained_until(self.folder) > iteration


def runs(process: psutil.Process) -> bool:
    """Whether a process is alive. One that nobody has waited for is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def begun(
    program: DrilledProgram,
    words: Sequence[str],
    folder: Path,
    output: Path,
    restarts: int = 0,
) -> Iterator[Training]:
    """A training; at the end nothing of it is alive."""
    with open(output, "ab") as file:
        process = subprocess.Popen(
            program.command(words, restarts), stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, env=program.environment(), start_new_session=True,
        )  # fmt: skip
    training = Training(process, folder, output)
    try:
        yield training
    finally:
        training.end()
