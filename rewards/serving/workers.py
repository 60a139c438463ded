"""Answers from child processes that can be stopped at any point, from any thread.

A library call that may run forever or fill the memory cannot be interrupted inside a thread, and
alarms (SIGALRM) reach only main threads. So it runs in a child process: one line of JSON in, one
line out. A process that does not answer in time is killed and replaced.
"""

import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_TIMEOUT = 120.0  # seconds that a process may take to load its libraries


@dataclass(eq=False)
class Worker:
    """One process of `script`, started by the first question. It prints a line once it is ready."""

    script: Path
    process: "subprocess.Popen[bytes] | None" = None
    unread: bytes = b""

    def ask(self, question: Any, seconds: float) -> Any | None:
        """The answer; None if it did not arrive in time or the process died."""
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            self.stop()
            return None
        line = self._line(seconds)
        if line is None:
            self.stop()
            return None
        return json.loads(line)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self.process is not None and self.process.poll() is None:
            return self.process
        # -P keeps the script's folder, where `types.py` is, off the path of its imports
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(self.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.unread = b""
        if self._line(START_TIMEOUT) is None:
            self.stop()
            raise RuntimeError(
                f"{self.script.name} does not start; run `{sys.executable} -P {self.script}` to "
                "see why"
            )
        return self.process

    def _line(self, seconds: float) -> bytes | None:
        """A line of output, or None if none comes in time."""
        assert self.process is not None and self.process.stdout is not None
        out = self.process.stdout.fileno()
        while b"\n" not in self.unread:
            if not select.select([out], [], [], seconds)[0]:
                return None
            part = os.read(out, 2**16)
            if not part:
                return None
            self.unread += part
        line, _, self.unread = self.unread.partition(b"\n")
        return line

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@dataclass(eq=False)
class Workers:
    """A pool of at most `count` processes of `script`, each with `seconds` to answer. Usable from
    any thread."""

    script: Path
    count: int
    seconds: float
    late: int = 0  # questions without an answer
    _idle: "queue.LifoQueue[Worker]" = field(default_factory=queue.LifoQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        for _ in range(self.count):
            self._idle.put(Worker(self.script))

    def ask(self, questions: Sequence[Any], seconds: float | None = None) -> list[Any | None]:
        """Answers in the order of the questions; None for a question that takes longer than
        `seconds` (by default the pool's limit)."""
        limit = self.seconds if seconds is None else seconds
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(lambda question: self._ask(question, limit), questions))

    def _ask(self, question: Any, seconds: float) -> Any | None:
        worker = self._idle.get()
        try:
            answer = worker.ask(question, seconds)
        finally:
            self._idle.put(worker)
        if answer is None:
            with self._lock:
                self.late += 1
        return answer

    def close(self) -> None:
        """End the idle processes. The others end with this process."""
        for _ in range(self.count):
            worker = self._idle.get()
            worker.stop()
            self._idle.put(worker)
