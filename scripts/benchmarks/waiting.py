"""Iterations with a judge behind a slow server, as multiples of those with a reward at hand.

    python scripts/benchmarks/waiting.py --latency 1.0 --at-once 64 --call 0.5

Each call of the tiny denoiser sleeps, as if it ran on a device of its own, so that sampling takes
longer than scoring. By turns: a local reward; the judge, asked for each part of the samples as soon
as it is drawn; the judge, asked for all samples after the last.
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from flowrl.run.experience import score_parts
from flowrl.run.save.checkpoint import Progress
from flowrl.run.state.session import Session
from flowrl.run.train import iterate
from flowrl.run.watch.alarms import Alarms
from scripts.benchmarks.judge_throughput import running
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


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    seconds: dict[str, list[float]] = {"local": [], "judge, in parts": [], "judge, at the end": []}
    with running(given.latency, "Score: 3") as url, tempfile.TemporaryDirectory() as name:
        judge = {"name": "judge", "url": url, "model": "fixed", "at_once": given.at_once}
        for _ in range(given.repeats):
            for arm, found in seconds.items():
                reward = {"name": "brightness"} if arm == "local" else judge
                kept = opened(Path(name), given, reward)
                parts = patch.object(score_parts, "asks_server", lambda _: False)
                began = time.perf_counter()
                if arm == "judge, at the end":
                    with parts:
                        metrics = iterate(kept, Progress(), Alarms())
                else:
                    metrics = iterate(kept, Progress(), Alarms())
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
