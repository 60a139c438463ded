"""The share of a judge server's throughput that reaches a run: many pairs, fixed latency.

    python scripts/benchmarks/judge_throughput.py --at-once 64 --latency 1.0 --waves 8 --repeats 5

The server, a process of its own, answers each request after exactly `latency` seconds, any number
at a time; with `at_once` in flight that is at_once / latency answers per second. The ratio is the
share that a judge of pairs gets of it, with encoding of images and reading of verdicts.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import tyro

from rewards import Samples
from rewards.load import load_judge
from rewards.types import reports


@dataclass
class Arguments:
    at_once: int = 64
    """Requests in flight."""
    latency: float = 1.0
    """Seconds that the server takes for each."""
    waves: int = 8
    """Requests, as a multiple of at_once."""
    repeats: int = 5
    side: int = 256
    """Pixels per side of the images, which are noise: the largest PNGs possible."""


FIRST = "<answer>Image 1 is better</answer>"


def serve(latency: float, said: str = FIRST) -> None:
    """Run a chat server that always says the same: it prefers the first. Prints its port."""
    import uvicorn
    from fastapi import FastAPI, Request

    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict:
        return {"data": [{"id": "fixed"}]}

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> dict:
        began = time.monotonic()
        await request.body()
        await asyncio.sleep(max(0.0, latency - (time.monotonic() - began)))
        return {"choices": [{"message": {"content": said}}], "usage": {}}

    async def run() -> None:
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await task

    asyncio.run(run())


@contextmanager
def running(latency: float, said: str = FIRST) -> Iterator[str]:
    """The address of such a server, in a process of its own."""
    command = [sys.executable, __file__, "serve", str(latency), said]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
    finally:
        server.terminate()
        server.wait()


def measure(url: str, given: Arguments) -> list[dict[str, float]]:
    """The figures of each repeat."""
    judge = load_judge("judge", url=url, model="fixed", both_orders=False, at_once=given.at_once)
    n = given.at_once  # pairs (i, i + w) for w in 1..waves: an image is in several, encoded once
    media = torch.rand(n, 3, given.side, given.side, generator=torch.Generator().manual_seed(0))
    samples = Samples(media, ["a storm"] * n, torch.zeros(n, dtype=torch.long))
    a = torch.arange(n).repeat(given.waves)
    b = (a + torch.arange(1, given.waves + 1).repeat_interleave(n)) % n
    found = []
    for _ in range(given.repeats):
        began, cpu = time.perf_counter(), time.process_time()
        p = judge(samples, a, b)
        wall = time.perf_counter() - began
        assert (p == 1).all(), "every request was answered"
        counts = reports({"judge": judge})
        found.append(
            {
                "ratio": len(a) / wall * given.latency / given.at_once,
                "wall": wall,
                "cpu": time.process_time() - cpu,
                "seconds_a_try": counts["calls/judge/seconds"] / counts["calls/judge/tries"],
                "tries": counts["calls/judge/tries"],
            }
        )
        print(json.dumps({name: round(value, 3) for name, value in found[-1].items()}), flush=True)
    return found


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(float(sys.argv[2]), *sys.argv[3:])
        return
    given = tyro.cli(Arguments, description=__doc__)
    with running(given.latency) as url:
        ratios = [row["ratio"] for row in measure(url, given)]
    print(
        f"throughput with {given.at_once} in flight over the server's own: median "
        f"{statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f} "
        f"of {len(ratios)} repeats"
    )


if __name__ == "__main__":
    main()
