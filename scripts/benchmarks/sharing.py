"""Time recipes whose samples share states: seconds per iteration, and the evaluations they count.

    python scripts/benchmarks/sharing.py --iterations 3

Prints a line of JSON per case: medians over the iterations, of one thread. To compare two versions,
run the script from both checkouts by turns. `cheap` takes latents for images and reads their
brightness, so that the network is nearly all of the time.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from flowrl.models.diffusers.policy import PipelinePolicy  # noqa: E402
from flowrl.run.alarms import Alarms  # noqa: E402
from flowrl.run.checkpoint import Progress  # noqa: E402
from flowrl.run.session import open_accelerator, open_session  # noqa: E402
from flowrl.run.train import iterate  # noqa: E402
from flowrl.settings.read import run_from  # noqa: E402

RECIPES: dict[str, dict[str, Any]] = {
    "temp_flow": {"steps": 8, "roots": 4, "branch": 6, "kl": 0.004},
    "branch_grpo": {"steps": 8, "at": [0, 1, 2, 3], "kernel": "flow_sde"},
    "branch_grpo_mix": {"steps": 8, "at": [0, 1, 2, 3]},
    "mix_grpo": {"steps": 8, "group": 12, "window": 3},
    "flow_grpo": {"steps": 8, "group": 12, "kl": 0.0},
}
PROMPTS = {"temp_flow": 1, "branch_grpo": 6, "branch_grpo_mix": 6, "mix_grpo": 6, "flow_grpo": 6}
COUNTS = ("count/sampling", "count/training", "count/frozen")
TIMES = ("seconds/cpu", "seconds/sample", "seconds/decode", "seconds/score", "seconds/update")


def measured(name: str, cheap: bool, iterations: int, folder: Path) -> dict[str, Any]:
    """Medians over some iterations, after one that is not counted."""
    settings = demo_settings()
    settings["recipe"] = {"name": name, **RECIPES[name]}
    settings["prompts"]["per_iteration"] = PROMPTS[name]
    settings["train"] |= {"iterations": 100, "alarms": "off", "self_test": "off"}
    if cheap:
        settings["rewards"] = settings["held_out_rewards"] = [{"name": "brightness"}]
    run = run_from(settings, "sharing")
    session = open_session(run, folder, open_accelerator(run, folder))
    progress, alarms = Progress(), Alarms()
    found = [iterate(session, progress, alarms) for _ in range(iterations + 1)][1:]
    middle = {key: statistics.median(each[key] for each in found) for key in (*COUNTS, *TIMES)}
    return {"recipe": name, "cheap": cheap, **middle}


def demo_settings() -> dict[str, Any]:
    return yaml.safe_load((PROJECT / "configs" / "demo_flow_grpo.yaml").read_text())


def latents_as_images(_policy: Any, x0: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x0[:, :3].clamp(0, 1).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    decode = PipelinePolicy.decode
    for name in given.recipes:
        for cheap in (False, True):
            PipelinePolicy.decode = latents_as_images if cheap else decode  # type: ignore[method-assign]
            with tempfile.TemporaryDirectory() as folder:
                print(json.dumps(measured(name, cheap, given.iterations, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
