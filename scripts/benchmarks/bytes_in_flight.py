"""Measure the memory of a reward server under large requests, and of a client under a large answer.

    python scripts/benchmarks/bytes_in_flight.py

Twenty-four requests of 60 MB reach `flowrl serve-reward` at the same time; then a client
asks a server whose answer is 3 MB of gzip that would become 3 GB. Printed: resident memory before,
at its peak and afterwards, and what was answered. Exit code 1 if the server's growth exceeds its
budget, or the client's 64 MB.
"""

import argparse
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil

from rewards.serving.batching import ServerLimits

MB = 10**6
CLIENT = """
import sys, torch
from rewards import Samples, load
reward = load("remote", url=sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
try: print(reward(Samples(["a"] * 4, ["p"] * 4, torch.zeros(4, dtype=torch.long))))
except Exception as error: print(type(error).__name__, str(error)[:200])
sys.stdout.flush()
sys.stdin.readline()
"""


class Peak:
    """The resident memory of a process, sampled until the block ends."""

    def __init__(self, pid: int) -> None:
        self.process, self.over = psutil.Process(pid), threading.Event()
        self.before = self.most = self.process.memory_info().rss

    def __enter__(self) -> "Peak":
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.over.wait(0.01):
            self.most = max(self.most, self.process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()
        self.after = self.process.memory_info().rss

    def __str__(self) -> str:
        names = ("before", "most", "after")
        return ", ".join(f"{name} {getattr(self, name) / MB:,.0f} MB" for name in names)

    @property
    def growth(self) -> int:
        return self.most - self.before


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def of_server(requests: int, size: int) -> int:
    """Growth of a reward server under many large requests."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "flowrl",
        "serve-reward",
        "{name: length, most: 100}",
        "--port",
        str(port),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with code {server.returncode}")
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.2)
        text = "word" * (size // 4)  # one word: the words of `length` would be counted as well
        tree = {"format": 1, "kind": "text", "media": [text], "prompts": ["p"], "group": [0]}
        body = json.dumps(tree).encode()

        def send(_: int) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            connection.request("POST", "/score", body, {"Content-Type": "application/json"})
            return connection.getresponse().status

        began = time.monotonic()
        with Peak(server.pid) as peak, ThreadPoolExecutor(requests) as pool:
            statuses = list(pool.map(send, range(requests)))
        seconds = time.monotonic() - began
        budget = ServerLimits().flight / MB
        print(f"server, {requests} requests of {size / MB:.0f} MB, budget {budget:.0f} MB: {peak}")
        print(f"  answered {sorted(set(statuses))} in {seconds:.1f} s")
        return peak.growth
    finally:
        server.kill()
        server.wait()


class Endless(BaseHTTPRequestHandler):
    """A reward server whose scores are 3 GB of zeros, compressed."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        health = {"format": 1, "reward": "x", "settings": {}, "version": "1", "scores": True,
                  "judges": False, "served": {}}  # fmt: skip
        self._send(json.dumps(health if self.path == "/health" else None).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        press = zlib.compressobj(9, wbits=31)
        parts = [press.compress(b'{"values": [0.0')]
        parts += [press.compress(b"0" * MB) for _ in range(3000)]
        self._send(b"".join([*parts, press.flush()]), "gzip")

    def _send(self, body: bytes, encoding: str = "identity") -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Encoding", encoding)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(OSError):  # the client has closed the connection
            self.wfile.write(body)


def of_client() -> int:
    """Growth of a client under an answer that becomes 3 GB."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdin is not None and client.stdout is not None
    assert client.stdout.readline() == "ready\n"
    with Peak(client.pid) as peak:
        client.stdin.write("\n")
        client.stdin.flush()
        said = client.stdout.readline().strip()
    client.kill()
    client.wait()
    server.shutdown()
    print(f"client, an answer of 3 GB in gzip: {peak}\n  {said}")
    return peak.growth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--size", type=int, default=60 * MB)
    given = parser.parse_args()
    bounded = of_server(given.requests, given.size) <= ServerLimits().flight
    bounded &= of_client() <= 64 * MB
    sys.exit(not bounded)


if __name__ == "__main__":
    main()
