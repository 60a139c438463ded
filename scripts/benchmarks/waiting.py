"""Iterations with a judge behind a slow server, as multiples of those with a local reward.

    python scripts/benchmarks/waiting.py --latency 1.0 --at-once 64 --call 0.5

Each call of the tiny denoiser sleeps, as if it ran on a device of its own, so that sampling takes
longer than scoring. By turns: a local reward; the judge, asked for each part of the samples as soon
as it is drawn; the judge, asked for all samples after the last.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from flowrl.run.experience import score_ahead
from flowrl.run.save.checkpoint import Progress
from flowrl.run.state.session import Session
from flowrl.run.train import iterate
from tests.support import runs


@dataclass
class Arguments:
    latency: float = 1.0
    """Seconds that the server takes for a request."""
    at_once: int = 64
    """Requests in flight."""
    call: float = 0.5
    """Seconds that a call of the denoiser sleeps."""
    prompts: int = 32
    rows: int = 32
    """Rows per call."""
    repeats: int = 2


def opened(folder: Path, given: Arguments, reward: dict) -> Session:
    pipeline = folder / "pipeline"
    if not pipeline.exists():
        runs.write_pipeline(pipeline)
    recipe = {**runs.FLOW_GRPO, "group": 8}
    settings = runs.tree(pipeline, folder, recipe, rows_per_call=given.rows, alarms="off")
    settings["prompts"]["per_iteration"] = given.prompts
    rows = [json.dumps({"prompt": f"{n} red balls"}) for n in range(given.prompts)]
    Path(settings["prompts"]["train"]).write_text("\n".join(rows))
    settings["rewards"] = [reward]
    kept = runs.opened(settings, folder)
    for denoiser in kept.learner.policy.roots().values():
        denoiser.register_forward_pre_hook(lambda *_: time.sleep(given.call))
    return kept


def serve(latency: float, said: str) -> None:
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
def running(latency: float, said: str) -> Iterator[str]:
    """The address of such a server, in a process of its own."""
    command = [sys.executable, __file__, "serve", str(latency), said]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(float(sys.argv[2]), sys.argv[3])
        return
    given = tyro.cli(Arguments, description=__doc__)
    seconds: dict[str, list[float]] = {"local": [], "judge, in parts": [], "judge, at the end": []}
    with running(given.latency, "Score: 3") as url, tempfile.TemporaryDirectory() as name:
        judge = {"name": "judge", "url": url, "model": "fixed", "at_once": given.at_once}
        for _ in range(given.repeats):
            for arm, found in seconds.items():
                reward = {"name": "brightness"} if arm == "local" else judge
                kept = opened(Path(name), given, reward)
                parts = patch.object(score_ahead, "asks_server", lambda _: False)
                began = time.perf_counter()
                if arm == "judge, at the end":
                    with parts:
                        metrics = iterate(kept, Progress()).metrics
                else:
                    metrics = iterate(kept, Progress()).metrics
                found.append(time.perf_counter() - began)
                phases = {n: round(v, 2) for n, v in metrics.items() if n.startswith("seconds")}
                print(arm, round(found[-1], 2), phases, flush=True)
    base = statistics.median(seconds["local"])
    for arm, found in seconds.items():
        middle = statistics.median(found)
        spread = f"{min(found):.2f} to {max(found):.2f}"
        print(f"{arm}: {middle:.2f} s, {middle / base:.3f} of local ({spread})")


if __name__ == "__main__":
    main()
