"""Joins waiting requests into one call of a reward or a judge."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rewards.combine import judged, reward_scores
from rewards.perception.media import items
from rewards.serving.wire import WireSamples, decode_samples
from rewards.types import Judge, Reward, RewardScores, Samples


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a server. The first two control batching, the others protect it."""

    batch: int = 64
    """Maximum number of samples per call of the reward; a request with more forms its own batch."""
    wait: float = 0.01
    """Seconds that a request waits for others to join it."""
    body: int = 256 * 2**20
    """Maximum number of bytes of a request."""
    flight: int = 512 * 2**20
    """Maximum number of bytes of all requests that are being read or answered, each counted three
    times: its bytes, their text and what it is parsed to. Further ones wait to be read; one request
    of the largest size always fits."""
    queue: int = 1024
    """Maximum number of waiting requests; further ones get status 503 and may retry in a second."""
    pixels: int = 2**25
    """Maximum number of pixels of all media of a request; each takes 12 bytes when decoded."""
    values: int = 500_000
    """Maximum number of values in a request's JSON; each takes about 200 bytes when parsed."""
    connections: int = 2048
    """Maximum number of open connections; further ones are closed."""
    header_seconds: float = 10.0
    """Seconds in which the headers of a request must arrive."""
    body_seconds: float = 120.0
    """Seconds in which a request must arrive as a whole."""

    def __post_init__(self) -> None:
        for name in ("batch", "body", "flight", "queue", "pixels", "values", "connections"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.wait < 0 or self.header_seconds <= 0 or self.body_seconds <= 0:
            raise ValueError(f"wait must be at least 0, and other times above 0: {self}")


@dataclass(eq=False)
class Job:
    """A waiting request, still encoded. `outcome` becomes its values, or the reward's error.

    pixels: total over its media
    """

    samples: WireSamples
    pixels: int
    a: list[int]
    b: list[int]
    gone: Callable[[], Awaitable[bool]]
    outcome: "asyncio.Future[RewardScores | BaseException]"


COUNTS = ("requests", "samples", "batches", "largest")

Scoring = Callable[[Sequence[Job]], list[RewardScores]]


@dataclass
class Batcher:
    """Merges waiting jobs into calls of `score`, which returns the values of each."""

    score: Scoring
    limits: ServerLimits
    pool: ThreadPoolExecutor
    jobs: asyncio.Queue[Job] = field(default_factory=asyncio.Queue)
    held: Job | None = None  # taken from the queue, but too large for the current batch
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    async def work(self) -> None:
        """Gather, score and answer requests forever."""
        while True:
            batch = await self._gather()
            # a client that has hung up will ask again: scoring for it would delay all others
            alive: list[Job] = []
            for job in batch:
                if await job.gone():
                    job.outcome.set_result(ConnectionError("the client has disconnected"))
                else:
                    alive.append(job)
            for kind in dict.fromkeys(job.samples.kind for job in alive):
                await self._answer([job for job in alive if job.samples.kind == kind])

    async def _gather(self) -> list[Job]:
        first = self.held or await self.jobs.get()
        self.held, batch, size = None, [first], len(first.samples.prompts)
        pixels = first.pixels
        try:
            async with asyncio.timeout(self.limits.wait):
                while size < self.limits.batch:
                    job = await self.jobs.get()
                    size += len(job.samples.prompts)
                    pixels += job.pixels
                    if size > self.limits.batch or pixels > self.limits.pixels:
                        self.held = job
                        break
                    batch.append(job)
        except TimeoutError:
            pass  # no other request in time
        return batch

    async def _answer(self, batch: list[Job]) -> None:
        (outcome,) = await asyncio.gather(self._call(batch), return_exceptions=True)
        if isinstance(outcome, BaseException) and len(batch) > 1:
            for job in batch:  # one bad request must not fail the others of its batch
                await self._answer([job])
            return
        for index, job in enumerate(batch):
            if not job.outcome.done():
                failed = isinstance(outcome, BaseException)
                job.outcome.set_result(outcome if failed else outcome[index])

    async def _call(self, batch: list[Job]) -> list[RewardScores]:
        answers = await asyncio.get_running_loop().run_in_executor(self.pool, self.score, batch)
        size = sum(len(job.samples.prompts) for job in batch)
        self.counts["requests"] += len(batch)
        self.counts["samples"] += size
        self.counts["batches"] += 1
        self.counts["largest"] = max(self.counts["largest"], size)
        return answers


def joined_requests(batch: Sequence[Job]) -> Samples:
    """Decode the samples of all requests; groups stay separate even if their ids are equal.

    ValueError names the entry of a request that cannot be decoded.
    """
    parts = [decode_samples(job.samples) for job in batch]
    if len(parts) == 1:
        return parts[0]
    media: Any = [item for part in parts for item in items(part)]
    if all(isinstance(part.media, Tensor) for part in parts):
        if len({part.media.shape[1:] for part in parts}) == 1:
            media = torch.cat([part.media for part in parts])
    ids: dict[tuple[int, int], int] = {}
    for index, part in enumerate(parts):
        for group in part.group.tolist():
            ids.setdefault((index, group), len(ids))
    groups = [ids[index, g] for index, part in enumerate(parts) for g in part.group.tolist()]
    meta = [row for part in parts for row in (part.meta or [{} for _ in part.prompts])]
    prompts = [prompt for part in parts for prompt in part.prompts]
    return Samples(media, prompts, torch.tensor(groups, dtype=torch.long), meta)


def scoring(name: str, reward: Reward) -> Scoring:
    def score(batch: Sequence[Job]) -> list[RewardScores]:
        scores = reward_scores(name, reward, joined_requests(batch))
        return _split(scores, [len(job.samples.prompts) for job in batch])

    return score


def judging(name: str, judge: Judge) -> Scoring:
    def score(batch: Sequence[Job]) -> list[RewardScores]:
        a: list[int] = []
        b: list[int] = []
        start = 0
        for job in batch:
            a += [row + start for row in job.a]
            b += [row + start for row in job.b]
            start += len(job.samples.prompts)
        first, second = (torch.tensor(rows, dtype=torch.long) for rows in (a, b))
        verdicts = judged(name, judge, joined_requests(batch), first, second)
        scores = RewardScores(verdicts, torch.ones(len(verdicts), dtype=torch.bool))
        return _split(scores, [len(job.a) for job in batch])

    return score


def _split(scores: RewardScores, sizes: list[int]) -> list[RewardScores]:
    """The scores of each request."""
    parts = zip(scores.values.split(sizes), scores.applies.split(sizes), strict=True)
    return [RewardScores(values, applies) for values, applies in parts]
