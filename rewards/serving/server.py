"""Serve a reward or a judge over HTTP, in the format of `rewards.serving.wire`.

    GET  /health    what is served, with its settings and version, and how much was served so far
    GET  /examples  two samples that the reward tells apart, if it knows such
    POST /score     a Batch; answers a number a sample
    POST /judge     Pairs; answers P(a is preferred) a pair

Requests that arrive while the reward is at work, or within a few milliseconds of each other, are
scored as one batch. One thread calls the reward, so it need not be safe for several.
"""

import asyncio
import hmac
import importlib.metadata
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rewards.combine import ByScore
from rewards.self_test import Exemplary
from rewards.serving import wire
from rewards.serving.batching import Batcher, Job, ServerLimits, judging, scoring
from rewards.types import Judge, Reward

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(frozen=True)
class Served:
    """A reward, a judge, or both, under a name. `token`: what clients must show, if anything."""

    name: str
    settings: Mapping[str, Any]
    reward: Reward | None
    judge: Judge
    token: str | None = None

    @classmethod
    def of(
        cls, name: str, settings: Mapping[str, Any], reward: Reward, token: str | None = None
    ) -> "Served":
        """A pointwise reward judges pairs too: the higher score is preferred."""
        return cls(name, settings, reward, ByScore(reward), token)


def create_app(served: Served, limits: ServerLimits = ServerLimits()) -> "FastAPI":
    """The ASGI application. Errors of the reward: 422 for its ValueError, 500 for any other."""
    from fastapi import FastAPI, HTTPException, Request

    pool = ThreadPoolExecutor(1)
    judges = Batcher(judging(served.judge), limits, pool)
    scores = Batcher(scoring(served.reward), limits, pool) if served.reward is not None else None
    batchers = [judges] if scores is None else [scores, judges]

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(batcher.work()) for batcher in batchers]
        yield
        for task in tasks:
            task.cancel()
        pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title=f"flowrl reward: {served.name}", lifespan=lifespan)
    app.add_middleware(RequestGate, token=served.token, most=limits.body)

    async def run(batcher: Batcher, batch: wire.WireSamples, request: Request) -> wire.ScoreAnswer:
        if batcher.jobs.qsize() >= limits.queue:
            raise HTTPException(503, "too many requests wait", {"Retry-After": "1"})
        pairs = (batch.a, batch.b) if isinstance(batch, wire.WirePairs) else ([], [])
        try:
            samples = wire.decode_samples(batch)
            _check_pairs(*pairs, len(samples.prompts))
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        job = Job(samples, *pairs, request.is_disconnected, asyncio.Future())
        batcher.jobs.put_nowait(job)
        outcome = await job.outcome
        if isinstance(outcome, BaseException):
            status = 422 if isinstance(outcome, ValueError) else 500
            raise HTTPException(status, f"{type(outcome).__name__}: {outcome}")
        return wire.ScoreAnswer(values=outcome)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {
            "format": wire.FORMAT,
            "reward": served.name,
            "settings": dict(served.settings),
            "version": importlib.metadata.version("flowrl"),
            "scores": scores is not None,
            "judges": True,
            "served": {key: sum(b.counts[key] for b in batchers) for key in judges.counts},
        }

    @app.get("/examples")
    async def examples() -> wire.WireSamples | None:
        source = served.judge if served.reward is None else served.reward
        known = source.examples() if isinstance(source, Exemplary) else None
        return (
            None if known is None else wire.WireSamples.model_validate(wire.encode_samples(known))
        )

    if scores is not None:

        @app.post("/score")
        async def score(batch: wire.WireSamples, request: Request) -> wire.ScoreAnswer:
            return await run(scores, batch, request)

    @app.post("/judge")
    async def judge(pairs: wire.WirePairs, request: Request) -> wire.ScoreAnswer:
        return await run(judges, pairs, request)

    return app


def _check_pairs(a: list[int], b: list[int], n: int) -> None:
    if len(a) != len(b):
        raise ValueError(f"{len(a)} a but {len(b)} b; a pair has both")
    if any(not 0 <= row < n for row in (*a, *b)):
        raise ValueError(f"a pair names a sample that is not among the {n}")


@dataclass
class RequestGate:
    """Turns away who has no token, and what is too large, before any of it is read."""

    app: "ASGIApp"
    token: str | None
    most: int

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        from fastapi import HTTPException
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
        if length.isdigit() and int(length) > self.most:
            await JSONResponse({"detail": _large(self.most)}, 413)(scope, receive, send)
            return
        received = 0

        async def counted() -> "Message":
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.most:  # sent in chunks, without a length
                raise HTTPException(413, _large(self.most))
            return message

        await self.app(scope, counted, send)


def _large(most: int) -> str:
    return f"a request has at most {most} bytes; send fewer samples (the setting batch)"
