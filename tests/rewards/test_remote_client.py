"""Answers that no server should send: asked again, and never a crash of the run."""

import gzip
import json
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("httpx")

from rewards.serving import bounded, client, wire
from rewards.serving.client import Client
from rewards.serving.requests import Ask, Failure, Malformed, Patience

GOOD = b'{"values": [1.5], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}'
HASTY = Patience(timeout=5.0, tries=3, backoff=0.01)


@contextmanager
def answering(*answers: tuple[int, bytes, dict[str, str]]) -> Iterator[str]:
    """A server whose n-th answer is the n-th of these, and then the last."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            status, body, headers = left[0] if len(left) == 1 else left.pop(0)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Dripping(BaseHTTPRequestHandler):
    """A server that sends a body byte by byte, each of them in time."""

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "60")
        self.end_headers()
        with suppress(OSError):
            for _ in range(60):
                self.wfile.write(b" ")
                time.sleep(0.05)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()


def test_a_time_limit_is_on_the_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SECONDS_TO_CLOSE", 0.3)
    with ThreadingHTTPServer(("127.0.0.1", 0), Dripping) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        asked = Client(f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(ValueError, match=r"no answer .*not complete after 0\.3 s"):
            asked.get("/models")
        with pytest.raises(ValueError, match=r"\(the answer is not complete after 0\.3 s\)"):
            asked.tell("/sync", {}, Patience(timeout=0.3, tries=1))
        server.shutdown()


def read(_: Ask, body: object) -> float:
    scores = wire.read_scores(body, 1)
    if scores is None:
        raise Malformed
    return float(scores.values[0])


ODD = {
    "400 digits": b'{"values": [' + b"9" * 400 + b"]}",
    "5000 digits": b'{"values": [' + b"9" * 5000 + b"]}",
    "nested brackets": b'{"values": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "not text": b"\xff\xfe",
    "infinity": b'{"values": [1e999]}',
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_body_is_asked_for_again(name):
    with answering((200, ODD[name], {}), (200, GOOD, {})) as url:
        client = Client(url, patience=HASTY)
        assert client.ask([Ask("/score", {})], read) == [1.5]
        report = client.report()
        assert report["malformed"] == 1 and report["tokens_in"] == 2
    with answering((200, ODD[name], {})) as url:
        outcome = Client(url, patience=HASTY).ask([Ask("/score", {})], read)
        assert outcome == [Failure("malformed", "malformed")]


def test_bad_gzip_is_asked_for_again():
    bad = (200, b"no gzip at all", {"Content-Encoding": "gzip"})
    with answering(bad, (200, GOOD, {})) as url:
        client = Client(url, patience=HASTY)
        assert client.ask([Ask("/score", {})], read) == [1.5]
        assert client.report()["malformed"] == 1


@pytest.mark.parametrize("tokens", [10**299, -1, True, 2**53 + 1, None, "3"])
def test_a_usage_that_cannot_be_is_not_counted(tokens):
    body = json.dumps({"values": [1.5], "usage": {"prompt_tokens": tokens}}).encode()
    with answering((200, body, {})) as url:
        client = Client(url, patience=HASTY)
        assert client.ask([Ask("/score", {})], read) == [1.5]
        assert client.report()["tokens_in"] == 0


def test_a_huge_usage_is_asked_for_again():
    body = b'{"values": [1.5], "usage": {"prompt_tokens": ' + b"9" * 400 + b"}}"
    with answering((200, body, {}), (200, GOOD, {})) as url:
        assert Client(url, patience=HASTY).ask([Ask("/score", {})], read) == [1.5]


@pytest.mark.parametrize(
    "after", ["\u00b2", "\u00b2\u00b3", "-1", "soon", "Mon, 99 Zzz 9999", "1e9"]
)
def test_a_retry_after_that_is_no_number_is_ignored(after):
    began = time.monotonic()
    with answering((503, b"{}", {"Retry-After": after}), (200, GOOD, {})) as url:
        assert Client(url, patience=HASTY).ask([Ask("/score", {})], read) == [1.5]
    assert time.monotonic() - began < 30


def test_a_server_that_asks_for_hours_has_failed():
    never = (503, b"{}", {"Retry-After": "9" * 400})
    with answering(never) as url, pytest.raises(ValueError, match="asks to wait"):
        Client(url, patience=HASTY).ask([Ask("/score", {})], read)


def test_a_greeting_that_is_no_json_is_one_sentence():
    for body in (ODD["nested brackets"], b"\xff"):
        with answering((200, body, {})) as url, pytest.raises(ValueError, match="not JSON"):
            Client(url).get("/health")


BOMB = zlib.compress(b"[" + b" " * 50_000_000 + b"]", 9)  # 50 kB
OVERSIZED = {
    "plain": (b" " * 2_000_000 + GOOD, {}),
    "gzip": (gzip.compress(b" " * 50_000_000 + GOOD), {"Content-Encoding": "gzip"}),
    "zlib": (BOMB, {"Content-Encoding": "deflate"}),
    "another compression": (GOOD, {"Content-Encoding": "br"}),
    "cut off": (gzip.compress(GOOD)[:-9], {"Content-Encoding": "gzip"}),
}


@pytest.mark.parametrize("kind", OVERSIZED)
def test_an_answer_is_bounded_in_sent_and_in_decompressed_bytes(kind):
    body, headers = OVERSIZED[kind]
    tracemalloc.start()
    try:
        with answering((200, body, headers), (200, GOOD, {})) as url:
            client = Client(url, patience=HASTY)
            assert client.ask([Ask("/score", {}, values=1)], read) == [1.5]
            assert client.report()["malformed"] == 1
        with answering((200, body, headers)) as url:
            with pytest.raises(ValueError, match="not JSON, or longer"):
                Client(url).get("/health", 2**16)
            with pytest.raises(ValueError, match="malformed"):
                Client(url, patience=HASTY).tell("/score", {})
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_small_compressed_answer_is_read():
    with answering((200, gzip.compress(GOOD), {"Content-Encoding": "gzip"})) as url:
        client = Client(url, patience=HASTY)
        assert client.ask([Ask("/score", {})], read) == [1.5]
        assert client.get("/health") == json.loads(GOOD)


def test_a_long_error_is_an_error():
    why = pytest.raises(ValueError, match=r"refuses every request: status 400, x+$")
    with answering((400, b"x" * 500_000, {})) as url, why:
        Client(url, patience=HASTY).ask([Ask("/a", {})], read)


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ({"max_tokens": 10}, 10),
        ({"max_tokens": 1, "logprobs": True, "top_logprobs": 20}, 85),
        ({"max_tokens": 10, "n": 4, "prompt": [1, 2, 3]}, 52),
        ({}, bounded.LONGEST_COMPLETION),
    ],
)
def test_what_completions_may_have(body, values):
    assert bounded.tokens_asked(body) == values
