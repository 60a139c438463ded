"""The head of a Ray cluster, whose death Ray itself answers by ending this process in silence."""

import socket
import threading
import time
from collections.abc import Callable

from flowrl.processes.watch import end_process
from flowrl.settings.sections.workers import WorkerSettings
from rewards.rights import Right, need

PULSE, LIMIT = 2.0, 15.0  # seconds; Ray waits for 60, and then exits without a word
STOPPED = 3  # the exit code


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


class RayHead:
    """Looks for the head at an address, and ends this process once it has gone."""

    def __init__(self, address: str, end: Callable[[str], None] = end) -> None:
        self.address, self.end = address, end
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray-head", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        last_answer = time.monotonic()
        while not self._over.wait(PULSE):
            if self._answers():
                last_answer = time.monotonic()
            elif time.monotonic() - last_answer > LIMIT:
                self.end(
                    f"the head of Ray at {self.address} has ended, or has not been reached for "
                    f"{LIMIT:g} s; the last checkpoint is complete. Start the cluster again if it "
                    "is not flowrl's own, and resume with flowrl train --resume (--restarts does)"
                )
                return

    def _answers(self) -> bool:
        try:
            socket.create_connection((self.host.strip("[]"), self.port), PULSE).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._over.set()
        self._thread.join()
