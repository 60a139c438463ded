"""The head of a Ray cluster, whose death Ray itself answers by ending this process in silence.

`RayHead` looks for the head from a thread, and is faster where Ray goes on waiting. Where the
node's own daemon dies with the head, Ray ends this process within a second, from code that runs no
handler: a small process beside it, `LastWords`, then says why.
"""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from flowrl.processes.watch import end_process
from flowrl.settings.sections.workers import WorkerSettings
from rewards.rights import Right, need

PULSE, LIMIT = 2.0, 15.0  # seconds; Ray waits for 60, and then exits without a word
STOPPED = 3  # the exit code
AFTERWARDS = (
    "the last checkpoint is complete. Start the cluster again if it is not flowrl's own, and "
    "resume with flowrl train --resume (--restarts does)"
)


def end(text: str) -> None:
    """End this process at once: its main thread may wait for Ray without end."""
    end_process(text, STOPPED)


def address_of(workers: WorkerSettings) -> str:
    """The address for `ray.init`, whose own default joins whatever it finds. NotGranted if the run
    may not use the one that its settings name."""
    if workers.address is None:
        return "local"
    need(Right.NETWORK, workers.address)
    return workers.address


class LastWords:
    """A process that says why this one has ended, if it ends together with the head."""

    _WATCH = """
import socket, sys
host, port, text = sys.argv[1:]
if not sys.stdin.buffer.read():  # else the run went on without Ray, or ended by itself
    try:
        socket.create_connection((host, int(port)), 2).close()
    except OSError:
        print(text, file=sys.stderr)
"""

    def __init__(self, host: str, port: int, text: str) -> None:
        # a session of its own: a signal to this process's group must not end it first
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", self._WATCH, host, str(port), text],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def close(self) -> None:
        """End it without a word, if it has not ended."""
        if self._process.poll() is None:
            with suppress(BrokenPipeError):  # it was killed at this moment
                self._process.communicate(b"over")


class RayHead:
    """Looks for the head at an address, and ends this process once it has gone."""

    def __init__(self, address: str, end: Callable[[str], None] = end) -> None:
        self.address, self.end = address, end
        host, _, port = address.rpartition(":")
        self.host, self.port = host.strip("[]"), int(port)
        self._last_words = LastWords(
            self.host,
            self.port,
            f"\nflowrl: the head of Ray at {address} has ended, and this run with it; {AFTERWARDS}",
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray-head", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        last_answer = time.monotonic()
        while not self._over.wait(PULSE):
            if self._answers():
                last_answer = time.monotonic()
            elif time.monotonic() - last_answer > LIMIT:
                self._last_words.close()
                self.end(
                    f"the head of Ray at {self.address} has ended, or has not been reached for "
                    f"{LIMIT:g} s; {AFTERWARDS}"
                )
                return

    def _answers(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), PULSE).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._last_words.close()
