"""A proxy of TCP connections between a run and a server, which a drill can cut."""

import select
import socket
import threading
from contextlib import suppress


class Proxy:
    """Listens on this machine and hands connections on to an address, until it is cut. Cut, it
    closes what is open and what comes."""

    def __init__(self, host: str, port: int) -> None:
        self.target, self.cut = (host, port), threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(0.1)  # here: it may be closed before the thread begins
        self.port: int = self.listener.getsockname()[1]
        self.handed = 0
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.closed = threading.Event()

    def __enter__(self) -> "Proxy":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        self.listener.close()
        self.thread.join(5)

    def _serve(self) -> None:
        while not self.closed.is_set():
            try:
                ours = self.listener.accept()[0]
            except TimeoutError:
                continue
            except OSError:  # closed
                return
            if self.cut.is_set():
                ours.close()
                continue
            self.handed += 1
            threading.Thread(target=self._hand_on, args=(ours,), daemon=True).start()

    def _hand_on(self, ours: socket.socket) -> None:
        with ours, suppress(OSError), socket.create_connection(self.target, 10) as theirs:
            ends = {ours: theirs, theirs: ours}
            while not self.cut.is_set() and not self.closed.is_set():
                for ready in select.select([*ends], [], [], 0.05)[0]:
                    part = ready.recv(2**16)
                    if not part:
                        return
                    ends[ready].sendall(part)
