"""Servers on localhost for tests: a reward's, and a judge's that can be told to misbehave."""

import base64
import hashlib
import io
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import uvicorn
from PIL import Image

from rewards import Samples
from rewards.perception.media import to_tensor
from rewards.serving.batching import ServerLimits
from rewards.serving.connections import uvicorn_settings
from rewards.serving.server import Served, create_app


def pictures(n: int, group: int = 2, size: int = 4, seed: int = 0) -> Samples:
    """Whole 8-bit values, so that the way back is exact."""
    rng = torch.Generator().manual_seed(seed)
    media = torch.randint(0, 256, (n, 3, size, size + 1), generator=rng) / 255
    return Samples(media, [f"prompt {i}" for i in range(n)], torch.arange(n) // group)


@contextmanager
def serving(served: Served, limits: ServerLimits = ServerLimits()) -> Iterator[str]:
    """The real reward server in a thread; gives its address."""
    with in_thread(create_app(served, limits), **uvicorn_settings(limits)) as address:
        yield address


@contextmanager
def in_thread(app: Any, port: int = 0, **settings: Any) -> Iterator[str]:
    """An application served in a thread; gives its address."""
    config = uvicorn.Config(app, port=port, log_level="error", **settings)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@dataclass(frozen=True)
class Faults:
    """Shares of tries that go wrong. Which ones is a function of the request, its try, the seed."""

    timeout: float = 0.0
    malformed: float = 0.0
    refused: float = 0.0  # status 400, for ever
    unparsable: float = 0.0  # fine but for its words, for ever
    seed: int = 0

    def of(self, request: str, attempt: int) -> str | None:
        fixed = random.Random(f"{self.seed}/{request}").random()
        if fixed < self.refused:
            return "refused"
        if fixed < self.refused + self.unparsable:
            return "unparsable"
        drawn = random.Random(f"{self.seed}/{request}/{attempt}").random()
        if drawn < self.timeout:
            return "timeout"
        return "malformed" if drawn < self.timeout + self.malformed else None


Answering = Callable[[str, list[torch.Tensor]], "str | dict[str, Any]"]
MALFORMED = [
    "<html>502</html>",
    "[1, 2",
    '{"choices": []}',
    '{"choices": [{"message": 3}]}',
    "\xff",
]


@dataclass
class ChatServer:
    """Chat completions from `answer(words, pictures)`; a dictionary is a whole choice."""

    answer: Answering
    faults: Faults = Faults()
    latency: float = 0.0
    stall: float = 3.0  # seconds that a timeout lasts, unless the server stops
    retry_after: str | None = None  # every first try is told 429 with it
    crash_after: int | None = None  # tries, after which nobody listens any more
    port: int = 0
    tries: Counter[str] = field(default_factory=Counter)
    arrivals: dict[str, list[float]] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most: int = 0  # at once
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> "ChatServer":
        self.stopped.clear()
        self.http = _Listener(("127.0.0.1", self.port), _handler(self))
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        self.stopped.set()
        self.http.shutdown()
        self.http.server_close()

    def __enter__(self) -> "ChatServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        if not self.stopped.is_set():
            self.stop()

    def arrive(self, data: bytes, headers: dict[str, str]) -> tuple[dict[str, Any], str | None]:
        body = json.loads(data)
        request = hashlib.sha256(data).hexdigest()
        with self.lock:
            attempt = self.tries[request]
            self.tries[request] += 1
            self.arrivals.setdefault(request, []).append(time.monotonic())
            self.bodies.append(body)
            self.headers.append(headers)
            self.now += 1
            self.most = max(self.most, self.now)
            if self.crash_after is not None and self.tries.total() > self.crash_after:
                if not self.stopped.is_set():
                    self.stopped.set()
                    threading.Thread(target=self.stop).start()
                return body, "crash"
        if self.retry_after is not None and attempt == 0:
            return body, "busy"
        return body, self.faults.of(request, attempt)

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        words, pictures = "", []
        for part in body["messages"][0]["content"]:
            if part["type"] == "text":
                words += part["text"] + "\n"
            else:
                pictures.append(unpacked(part["image_url"]["url"]))
        said = self.answer(words, pictures)
        return (
            {"message": {"role": "assistant", "content": said}} if isinstance(said, str) else said
        )


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Clients hang up here on purpose."""


def unpacked(url: str) -> torch.Tensor:
    kind, _, data = url.partition(",")
    assert kind in ("data:image/png;base64", "data:image/jpeg;base64")
    return to_tensor(Image.open(io.BytesIO(base64.b64decode(data))))


def _handler(server: ChatServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            found = self.path == "/v1/models"
            self.reply(200 if found else 404, json.dumps({"data": [{"id": "tiny"}]}))

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            body, fault = server.arrive(data, dict(self.headers))
            try:
                self.react(body, fault, len(data))
            finally:
                with server.lock:
                    server.now -= 1

        def react(self, body: dict[str, Any], fault: str | None, size: int) -> None:
            server.stopped.wait(server.stall if fault == "timeout" else server.latency)
            if fault == "crash" or server.stopped.is_set():
                self.close_connection = True
            elif fault == "busy":
                self.reply(429, "{}", {"Retry-After": str(server.retry_after)})
            elif fault == "refused":
                self.reply(400, '{"error": "too long"}')
            elif fault == "malformed":
                self.reply(200, MALFORMED[size % len(MALFORMED)])
            else:
                choice = {"message": {"content": "Hm."}}
                if fault != "unparsable":
                    choice = server.choice(body)
                usage = {"prompt_tokens": 10, "completion_tokens": 3}
                self.reply(200, json.dumps({"choices": [choice], "usage": usage}))

        def reply(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
            data = text.encode("latin-1")
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    return Handler
