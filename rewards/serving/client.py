"""Send many requests to one HTTP server, with a cap in flight, deadlines, retries with backoff, and
a log. A request ends in one of two ways:

with the value that `read` took from its answer, or with a `Failure` and its reason. It counts once,
however often it was tried, and never gets an invented answer.

`Client.ask` waits for all answers. It may be called from several threads at once: each call has its
own event loop, and all calls share the cap, the counts and the log.
"""

import asyncio
import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rewards.guard import completed
from rewards.perception.packages import needs_client
from rewards.rights import Right, need
from rewards.serving.answers import parse_answer, retry_seconds, token_counts
from rewards.serving.bounded import LIST_BYTES, Body, most_bytes
from rewards.serving.in_flight import InFlight
from rewards.serving.requests import Again, Ask, Failure, Malformed, Patience, Refused, Unparsable

if TYPE_CHECKING:
    import ssl

    import httpx
    from tenacity import RetryCallState

T = TypeVar("T")

LONGEST_WAIT = 30.0  # seconds between two tries, unless the server asks for more
MOST_WAIT = 300.0  # a server that asks for a longer pause (Retry-After) has failed
REFUSED_STATUSES = {
    401: "the server does not accept the token; set key to the environment variable that has it",
    403: "the server forbids this; set key to the environment variable that has the right token",
    404: "there is nothing at this address; check the url",
}
SECONDS_TO_CLOSE = 5.0  # seconds in which a server must answer when a run starts
RETRIED_STATUSES = (408, 425, 429)  # try again, as after every 5xx


class TokenRefused(ValueError):
    """The server answers, but not to this token, or to none."""


@dataclass
class _Course(Generic[T]):
    """A request in progress."""

    ask: Ask
    name: str
    outcome: "T | Failure | None" = None
    tries: int = 0
    tokens: tuple[int, int] = (0, 0)
    seconds: float = 0.0


@dataclass
class Client:
    """Client of the server at `url`. `key` names an environment variable with the token, if
    needed."""

    url: str
    key: str | None = None
    patience: Patience = field(default_factory=Patience)
    log: str | None = None
    """A file that gets one JSON line per request."""
    _flight: InFlight = field(init=False, repr=False)
    _sent: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: {self.url!r} must begin with http:// or https://")
        need(Right.NETWORK, self.url)
        if self.key is not None:
            need(Right.VARIABLES, self.key, f"the environment variable {self.key}")
        if self.log is not None:
            need(Right.FILES, self.log, path=Path(self.log))
        self.url = self.url.rstrip("/")
        if self.key is not None and not os.environ.get(self.key):
            raise ValueError(
                f"the environment variable {self.key} is empty; export the token first"
            )
        needs_client({})
        self._flight = InFlight(self.patience.at_once)

    def get(self, path: str, most: int = LIST_BYTES) -> Any:
        """GET a JSON of at most `most` bytes, retried for a few seconds. ValueError if there is no
        answer; TokenRefused if the server wants another token."""
        import httpx

        end = time.monotonic() + SECONDS_TO_CLOSE
        while True:
            try:
                answer = self._answer("GET", path, None, SECONDS_TO_CLOSE, most)
                if answer.status_code in REFUSED_STATUSES:
                    kind = ValueError if answer.status_code == 404 else TokenRefused
                    raise kind(f"{self.url}{path}: {REFUSED_STATUSES[answer.status_code]}")
                answer.raise_for_status()
                return parse_answer(answer)
            except Malformed as error:
                raise ValueError(
                    f"the answer at {self.url}{path} is not JSON, or longer than {most} bytes"
                ) from error
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                if time.monotonic() > end:
                    reason = str(error) or type(error).__name__
                    raise ValueError(f"no answer from {self.url}{path} ({reason})") from error
                time.sleep(0.2)

    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float, most: int
    ) -> "httpx.Response":
        """One try. Malformed for an answer of more than `most` bytes. httpx.ReadTimeout if it is
        not complete after `seconds`; httpx's own limit is on each part of a body, so a server that
        sends on and on would never reach it."""
        import httpx

        end, url = time.monotonic() + seconds, self.url + path
        options: dict[str, Any] = {
            "headers": self._headers,
            "timeout": seconds,
            "verify": self._tls,
        }
        with httpx.stream(method, url, json=body, **options) as answer:
            read = Body(answer.headers.get("Content-Encoding", ""), most)
            for part in answer.iter_raw():
                read.add(part)
                if time.monotonic() > end:
                    reason = f"the answer is not complete after {seconds:g} s"
                    raise httpx.ReadTimeout(reason, request=answer.request)
            return _plain(answer, read.whole())

    def post(self, path: str, body: Mapping[str, Any], most: int) -> tuple[int, bytes]:
        """POST a request once: the status and the answer. ConnectionError if there is no whole
        answer of at most `most` bytes."""
        import httpx

        try:
            answer = self._answer("POST", path, body, self.patience.timeout, most)
        except (httpx.HTTPError, Malformed) as error:
            reason = str(error) or type(error).__name__
            raise ConnectionError(f"no answer from {self.url}{path} ({reason})") from error
        return answer.status_code, answer.content

    def tell(self, path: str, body: Mapping[str, Any], patience: Patience | None = None) -> str:
        """POST a request and return the answer's text. ValueError, with the reason, if there is no
        answer.

        Retries while the server is busy or unreachable, but not if it failed (500).
        """
        import httpx

        how, reason = patience or self.patience, ""
        for attempt in range(how.tries):
            if attempt > 0:
                time.sleep(min(how.backoff * 2.0 ** (attempt - 1), LONGEST_WAIT))
            try:
                answer = self._answer("POST", path, body, how.timeout, LIST_BYTES)
            except (httpx.HTTPError, Malformed) as error:
                reason = str(error) or type(error).__name__
                continue
            if answer.status_code < 300:
                return answer.text
            reason = f"status {answer.status_code}, {answer.text[:500]}"
            if answer.status_code <= 500 and answer.status_code not in RETRIED_STATUSES:
                break
        raise ValueError(f"{self.url}{path} ({reason})")

    def ask(self, asks: Sequence[Ask], read: Callable[[Ask, Any], T]) -> list[T | Failure]:
        """Answers in the order of `asks`.

        `read` takes a request and the JSON of its answer, and raises Malformed (tried again) or
        Unparsable (final). ValueError if the server cannot answer any request: no such address, a
        wrong token, every request refused. RuntimeError after `cancel`.
        """
        courses: list[_Course[T]] = [
            _Course(request, f"{os.getpid()}-{next(self._sent)}") for request in asks
        ]
        try:
            completed(self._all(courses, read))
        except asyncio.CancelledError as error:
            raise RuntimeError(f"the requests to {self.url} were cancelled") from error
        self._write(courses)
        outcomes: list[T | Failure] = []
        for course in courses:
            assert course.outcome is not None
            outcomes.append(course.outcome)
        refused = [o for o in outcomes if isinstance(o, Failure) and o.reason == "refused"]
        if outcomes and len(refused) == len(outcomes):
            raise ValueError(f"{self.url} refuses every request: {refused[0].words}")
        return outcomes

    def report(self) -> dict[str, float]:
        """Sums since the last report: requests, failed requests, failed tries by reason,
        seconds in flight (over all tries, including parallel ones), and tokens if the server
        counts them."""
        names = ("requests", "failed", "tries", "timeout", "unreachable", "status", "malformed")
        more = ("refused", "unparsable", "seconds", "tokens_in", "tokens_out")
        counts = self._flight.counted()
        return {name: counts.get(name, 0.0) for name in (*names, *more)}

    def cancel(self) -> None:
        """Cancel calls of `ask` that run in other threads."""
        self._flight.cancel()

    @cached_property
    def _tls(self) -> "ssl.SSLContext":
        import httpx

        return httpx.create_ssl_context()  # certificates take 30 ms to read: once, not every call

    @property
    def _headers(self) -> dict[str, str]:
        plain = {"Accept-Encoding": "identity"}  # answers are short
        if self.key is None:
            return plain
        return plain | {"Authorization": f"Bearer {os.environ[self.key]}"}

    async def _all(self, courses: Sequence[_Course[T]], read: Callable[[Ask, Any], T]) -> None:
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        with self._flight.cancellable():
            async with httpx.AsyncClient(
                headers=self._headers, limits=limits, timeout=None, verify=self._tls
            ) as http:
                await asyncio.gather(*(self._one(http, course, read) for course in courses))

    async def _one(
        self,
        http: "httpx.AsyncClient",
        course: _Course[T],
        read: Callable[[Ask, Any], T],
    ) -> None:
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

        async def attempt() -> T:
            async with self._flight.slot():  # not held while waiting for the next try
                course.tries += 1
                began = time.monotonic()
                try:
                    return read(course.ask, await self._send(http, course))
                finally:
                    course.seconds += time.monotonic() - began

        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.patience.tries),
            wait=self._wait,
            retry=retry_if_exception_type(Again),
            reraise=True,
            after=self._count,
        )
        try:
            course.outcome = await retrying(attempt)
        except (Again, Refused, Unparsable) as error:
            reason = error.reason if isinstance(error, Again) else type(error).__name__.lower()
            course.outcome = Failure(reason, str(error))
            self._flight.add({"failed": 1} | ({} if isinstance(error, Again) else {reason: 1}))
        self._flight.add({"requests": 1, "tries": course.tries, "seconds": course.seconds})

    async def _send(self, http: "httpx.AsyncClient", course: _Course[T]) -> Any:
        import httpx

        try:
            async with asyncio.timeout(self.patience.timeout):
                answer = await self._received(http, course)
        except TimeoutError as error:
            raise Again("timeout") from error
        except httpx.TransportError as error:
            raise Again("unreachable") from error
        except httpx.RequestError as error:  # its compression is damaged
            raise Malformed from error
        self._check(answer)
        body = parse_answer(answer)
        spent = token_counts(body)
        course.tokens = (course.tokens[0] + spent[0], course.tokens[1] + spent[1])
        self._flight.add({"tokens_in": spent[0], "tokens_out": spent[1]})
        return body

    async def _received(self, http: "httpx.AsyncClient", course: _Course[T]) -> "httpx.Response":
        """One try of a request. Malformed for an answer of more than the bytes that what is asked
        for may have."""
        url, name = self.url + course.ask.path, {"X-Request-Id": course.name}
        async with http.stream("POST", url, json=course.ask.body, headers=name) as answer:
            encoding = answer.headers.get("Content-Encoding", "")
            failed = answer.status_code >= 300
            read = Body("" if failed else encoding, most_bytes(course.ask.values))
            try:
                async for part in answer.aiter_raw():
                    read.add(part)
            except Malformed:
                if not failed:
                    raise
            return _plain(answer, b"".join(read.parts) if failed else read.whole())

    def _check(self, answer: "httpx.Response") -> None:
        code = answer.status_code
        if code in REFUSED_STATUSES:
            raise ValueError(f"{answer.url}: {REFUSED_STATUSES[code]} (status {code})")
        if code in RETRIED_STATUSES or code >= 500:
            after = retry_seconds(answer.headers.get("Retry-After"))
            if after > MOST_WAIT:
                raise Refused(f"it asks to wait {after:.0f} s, more than {MOST_WAIT:.0f} s")
            raise Again("status", after, f"status {code}, {answer.text[:500]}")
        if code >= 300:
            raise Refused(f"status {code}, {answer.text[:500]}")

    def _count(self, state: "RetryCallState") -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        assert isinstance(error, Again)
        self._flight.add({error.reason: 1})

    def _wait(self, state: "RetryCallState") -> float:
        """Seconds to wait: 0.5 to 1.5 times the doubled backoff at random, or more if the server
        asks."""
        doubled = min(self.patience.backoff * 2.0 ** (state.attempt_number - 1), LONGEST_WAIT)
        error = state.outcome.exception() if state.outcome is not None else None
        requested = error.after if isinstance(error, Again) else 0.0
        return max(requested, doubled * _jitter.uniform(0.5, 1.5))

    def _write(self, courses: Sequence[_Course[T]]) -> None:
        if self.log is None:
            return
        lines = []
        for course in courses:
            outcome = course.outcome
            line = {"id": course.name, "at": round(time.time(), 3), **course.ask.note}
            line |= {"tries": course.tries, "seconds": round(course.seconds, 4)}
            line |= {"tokens_in": course.tokens[0], "tokens_out": course.tokens[1]}
            if isinstance(outcome, Failure):
                line["failed"] = outcome.reason
            else:
                is_plain = isinstance(outcome, int | str) or (
                    isinstance(outcome, float) and math.isfinite(outcome)
                )
                line["verdict"] = outcome if is_plain else None
            lines.append(json.dumps(line, allow_nan=False) + "\n")
        path = Path(self.log).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._flight.lock, path.open("a") as file:
            file.write("".join(lines))


_jitter = random.Random()  # the global generator may belong to an experiment


def _plain(answer: "httpx.Response", content: bytes) -> "httpx.Response":
    """The answer with a body that has been read and decompressed."""
    import httpx

    gone = (b"content-encoding", b"content-length", b"transfer-encoding")
    headers = [(name, value) for name, value in answer.headers.raw if name.lower() not in gone]
    return httpx.Response(
        answer.status_code, headers=headers, content=content, request=answer.request
    )
