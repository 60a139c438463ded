"""Serve a reward or a judge over HTTP, in the format of `rewards.serving.wire`.

    GET  /health    the reward with its settings and version, and counts of served requests
    GET  /examples  two samples that the reward must score differently, if it has any
    POST /score     a WireSamples; returns a number per sample
    POST /judge     a WirePairs; returns P(a is preferred) per pair

Requests that arrive while the reward is running, or within a few milliseconds of each other, are
scored as one batch. One thread decodes and scores, so the reward need not be thread-safe; another
reads requests, so that the event loop does neither.
"""

import asyncio
import hmac
import importlib.metadata
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rewards.checks.self_test import Exemplary
from rewards.combine import ByScore
from rewards.guard import no_exit
from rewards.serving import wire
from rewards.serving.batching import COUNTS, Batcher, Job, ServerLimits, judging, scoring
from rewards.types import Judge, Reward

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(frozen=True)
class Served:
    """A reward, a judge, or both, under one name. `token`: the token that clients must send, if
    any."""

    name: str
    settings: Mapping[str, Any]
    reward: Reward | None
    judge: Judge
    token: str | None = None

    @classmethod
    def of(
        cls, name: str, settings: Mapping[str, Any], reward: Reward, token: str | None = None
    ) -> "Served":
        """A reward, and its judge of pairs, which prefers the sample with the higher score."""
        return cls(name, settings, reward, ByScore(reward, name), token)


def create_app(served: Served, limits: ServerLimits = ServerLimits()) -> "FastAPI":
    """The ASGI application. Errors of the reward: 422 for a ValueError, 500 for any other."""
    from fastapi import FastAPI

    scorer, reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    batchers = {"/judge": Batcher(judging(served.name, served.judge), limits, scorer)}
    if served.reward is not None:
        batchers["/score"] = Batcher(scoring(served.name, served.reward), limits, scorer)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(batcher.work()) for batcher in batchers.values()]
        yield
        for task in tasks:
            task.cancel()
        for pool in (scorer, reader):
            pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title=f"flowrl reward: {served.name}", lifespan=lifespan)
    app.add_middleware(RequestGate, token=served.token, limits=limits)
    _add_descriptions(app, served, batchers)
    for path, batcher in batchers.items():
        _add_route(app, path, batcher, reader)
    return app


def _add_descriptions(app: "FastAPI", served: Served, batchers: Mapping[str, Batcher]) -> None:
    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {
            "format": wire.FORMAT,
            "reward": served.name,
            "settings": dict(served.settings),
            "version": importlib.metadata.version("flowrl"),
            "scores": served.reward is not None,
            "judges": True,
            "served": {key: sum(b.counts[key] for b in batchers.values()) for key in COUNTS},
        }

    @app.get("/examples")
    async def examples() -> wire.WireSamples | None:
        source = served.judge if served.reward is None else served.reward
        with no_exit(served.name, "judge" if served.reward is None else "reward"):
            examples = source.examples() if isinstance(source, Exemplary) else None
        if examples is None:
            return None
        return wire.WireSamples.model_validate(wire.encode_samples(examples))


def _add_route(app: "FastAPI", path: str, batcher: Batcher, reader: ThreadPoolExecutor) -> None:
    from fastapi import Request

    model = wire.WirePairs if path == "/judge" else wire.WireSamples

    async def answer(request: Request) -> wire.ScoreAnswer:
        return await _answer(batcher, model, reader, request)

    route = app.post(
        path, name=path[1:], openapi_extra=_schema(model), response_model_exclude_none=True
    )
    route(answer)


def _schema(model: type[wire.WireSamples]) -> dict[str, Any]:
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"content": content, "required": True}}


async def _answer(
    batcher: Batcher, model: type[wire.WireSamples], reader: ThreadPoolExecutor, request: "Request"
) -> wire.ScoreAnswer:
    """Read a request and wait for its scores. HTTPException if they cannot be computed."""
    from fastapi import HTTPException

    _refuse_when_full(batcher)  # before its body is read
    # `request.body()` would keep the bytes until the answer, beside what they were parsed to
    parts = [part async for part in request.stream()]
    try:
        loop = asyncio.get_running_loop()
        batch, pixels = await loop.run_in_executor(
            reader, _read_request, parts, model, batcher.limits
        )
    except _NotJson as error:
        raise HTTPException(400, str(error)) from error
    except ValueError as error:
        raise HTTPException(422, _sendable(str(error))) from error
    pairs = (batch.a, batch.b) if isinstance(batch, wire.WirePairs) else ([], [])
    job = Job(batch, pixels, *pairs, request.is_disconnected, asyncio.Future())
    _refuse_when_full(batcher)  # others may have taken the places while it was read
    batcher.jobs.put_nowait(job)
    outcome = await job.outcome
    if isinstance(outcome, BaseException):
        status = 422 if isinstance(outcome, ValueError) else 500
        raise HTTPException(status, _sendable(f"{type(outcome).__name__}: {outcome}"))
    return wire.ScoreAnswer.of(outcome)


def _refuse_when_full(batcher: Batcher) -> None:
    from fastapi import HTTPException

    if batcher.jobs.qsize() >= batcher.limits.queue:
        raise HTTPException(503, "too many requests are waiting", {"Retry-After": "1"})


_TEXT = re.compile(rb'"(?:[^"\\]+|\\.?)*+(?:"|\Z)', re.DOTALL)  # to the end, if it is not closed


class _NotJson(Exception):
    """A body that is not JSON, or that contains NaN or Infinity, which JSON does not have."""


def _read_request(
    parts: list[bytes], model: type[wire.WireSamples], limits: ServerLimits
) -> tuple[wire.WireSamples, int]:
    """Parse a request and count the pixels of its media. ValueError or _NotJson for a wrong format.

    Decodes only headers. The list of the body's parts is empty afterwards.
    """
    body = b"".join(parts)
    parts.clear()
    _check_values(body, limits.values)
    try:
        content = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _NotJson(f"the body is not JSON: {error}") from error
    try:
        batch = model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[:3]
        faults = (f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in first)
        raise ValueError("; ".join(faults)) from error
    if isinstance(batch, wire.WirePairs):
        _check_pairs(batch.a, batch.b, len(batch.prompts))
    return batch, wire.count_pixels(batch, limits.pixels)


def _check_values(body: bytes, most: int) -> None:
    """ValueError for more values than `most`, before any is parsed. Commas inside texts do not
    count."""
    if _openings(body) > most and _openings(_TEXT.sub(b'""', body)) > most:
        raise ValueError(
            f"the body has more than {most} JSON values; send fewer samples (the setting batch), "
            "or start the server with a larger --values"
        )


def _openings(body: bytes) -> int:
    return sum(body.count(mark) for mark in (b",", b"[", b"{"))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a valid JSON number; send null")


def _sendable(text: str) -> str:
    """The text without characters that UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def _check_pairs(a: list[int], b: list[int], n: int) -> None:
    if len(a) != len(b):
        raise ValueError(f"{len(a)} entries in a but {len(b)} in b; every pair needs both")
    if any(not 0 <= row < n for row in (*a, *b)):
        raise ValueError(f"a pair refers to a sample outside the {n} that were sent")


@dataclass
class RequestGate:
    """Refuses requests without the token, and requests that are too large or too slow."""

    app: "ASGIApp"
    token: str | None
    limits: ServerLimits
    flight: "_Flight" = field(init=False)

    def __post_init__(self) -> None:
        self.flight = _Flight(max(self.limits.flight, self.limits.body))

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        from starlette.responses import JSONResponse

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if self.token is not None and not hmac.compare_digest(
            headers.get(b"authorization", b""), b"Bearer " + self.token.encode()
        ):
            answer = JSONResponse({"detail": "a token is needed"}, 401)
            await answer(scope, receive, send)
            return
        if length.isdigit() and int(length) > self.limits.body:
            await JSONResponse({"detail": _large(self.limits.body)}, 413)(scope, receive, send)
            return
        sent = scope["method"] not in ("GET", "HEAD")
        size = (
            int(length) if length.isdigit() and b"content-length" in headers else self.limits.body
        )
        try:
            # its bytes, the text that they are decoded to, and what that is parsed to
            weight = min(3 * size, self.flight.most) if sent else 0
            async with self.flight.held(weight, self.limits.body_seconds):
                await self.app(scope, _Bounded(receive, self.limits), send)
        except _Full:
            detail, again = {"detail": "too many bytes are in flight"}, {"Retry-After": "1"}
            await JSONResponse(detail, 503, again)(scope, receive, send)


class _Full(Exception):
    """The budget of bytes was not free in time."""


class _Flight:
    """Bytes of requests that are being read or answered, at most `most`; first come, first
    served."""

    def __init__(self, most: int) -> None:
        self.most = self.free = most
        self.waiting = deque[tuple[int, asyncio.Future[None]]]()

    @asynccontextmanager
    async def held(self, size: int, seconds: float) -> AsyncIterator[None]:
        """Hold the bytes of a request. _Full if they are not free in time."""
        await self._take(size, seconds)
        try:
            yield
        finally:
            self._give(size)

    async def _take(self, size: int, seconds: float) -> None:
        if not self.waiting and size <= self.free:
            self.free -= size
            return
        turn = (size, asyncio.get_running_loop().create_future())
        self.waiting.append(turn)
        try:
            async with asyncio.timeout(seconds):
                await turn[1]
        except BaseException as error:
            if turn in self.waiting:
                self.waiting.remove(turn)
                self._give(0)  # the next ones may fit where this one did not
            else:
                self._give(size)  # it had been given them in the meantime
            if isinstance(error, TimeoutError):
                raise _Full from error
            raise

    def _give(self, size: int) -> None:
        self.free += size
        while self.waiting and self.waiting[0][0] <= self.free:
            size, turn = self.waiting.popleft()
            self.free -= size
            if not turn.done():  # else it was cancelled just now, and gives them back itself
                turn.set_result(None)


class _Bounded:
    """The messages of a request, whose body must end in time and within the byte limit."""

    def __init__(self, receive: "Receive", limits: ServerLimits) -> None:
        self.receive, self.limits, self.received, self.ended = receive, limits, 0, False
        self.deadline = asyncio.get_running_loop().time() + limits.body_seconds

    async def __call__(self) -> "Message":
        from fastapi import HTTPException

        if self.ended:  # what follows says when the client hangs up
            return await self.receive()
        try:
            async with asyncio.timeout_at(self.deadline):
                message = await self.receive()
        except TimeoutError as error:
            text = f"the body did not arrive in {self.limits.body_seconds:g} s"
            raise HTTPException(408, text, {"Connection": "close"}) from error
        self.received += len(message.get("body", b""))
        self.ended = not message.get("more_body", False)
        if self.received > self.limits.body:  # sent in chunks, without a length
            raise HTTPException(413, _large(self.limits.body))
        return message


def _large(most: int) -> str:
    return (
        f"a request has at most {most} bytes; send fewer samples (the setting batch), or start the "
        "server with a larger --body"
    )
