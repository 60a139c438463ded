"""Sampling workers on a local Ray: the bits of the run in one process, whatever happens to them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support import runs, text_runs, tiny_lm

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
CHAIN = {"name": "flow_grpo", "steps": 3, "group": 2}
RECIPES: dict[str, dict[str, Any]] = {
    "chain": CHAIN,
    "tree": {"name": "branch_grpo", "steps": 3, "at": [0, 1]},
    "window": {"name": "flow_grpo_fast", "steps": 4, "group": 2, "window": 2},
    "forks": {"name": "temp_flow", "steps": 3, "roots": 1, "branch": 2},
    "text": text_runs.GRPO,
    "matching": {"name": "nft", "steps": 3, "group": 2, "levels_per_sample": 2},
}
UNTIMED = ("seconds", "time", "memory", "eta", "workers")


def begun(pipeline: Path, folder: Path, recipe: dict[str, Any], **workers: Any) -> list[str]:
    """The command of a run of four iterations; its folder is `folder / run`."""
    folder.mkdir(parents=True)
    if recipe["name"] == "text_grpo":
        model = tiny_lm.write(folder / "model")
        settings = text_runs.tree(model, folder, recipe, iterations=4)
    else:
        settings = runs.tree(pipeline, folder, recipe, iterations=4)
        settings["prompts"]["per_iteration"] = 4
    file = runs.write({**settings, "workers": {"unit": 1, **workers}}, folder)
    return [sys.executable, "-m", "flowrl", "train", str(file), "--folder", str(folder / "run")]


def finished(command: list[str], folder: Path) -> tuple[list[dict], dict[str, Any]]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return outcome(folder / "run")


def outcome(run: Path) -> tuple[list[dict], dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if not k.startswith(UNTIMED)} for line in lines]
    files = [*run.glob("adapter/*.safetensors"), *run.glob("model/*.safetensors")]
    assert files
    return kept, {n: weight.tolist() for each in files for n, weight in load_file(each).items()}


@pytest.mark.parametrize("kind", RECIPES)
def test_workers_change_no_bit(kind, pipeline, tmp_path):
    """Two workers and a reward in replicas, beside the same units in one process."""
    scored = {"share" if kind == "text" else "brightness": {"replicas": 2}}
    found = [
        finished(begun(pipeline, folder, RECIPES[kind], **workers), folder)
        for folder, workers in (
            (tmp_path / "here", {}),
            (tmp_path / "two", {"sampling": 2, "rewards": scored}),
        )
    ]
    assert found[0] == found[1]


def test_a_lag_is_of_the_run_and_not_of_its_timing(pipeline, tmp_path):
    """One worker, three of which one is killed again and again, and a run that is killed whole."""
    want = finished(begun(pipeline, tmp_path / "one", CHAIN, sampling=1, lag=1), tmp_path / "one")
    disturbed = begun(pipeline, tmp_path / "three", CHAIN, sampling=3, lag=1)
    process = subprocess.Popen(disturbed, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for iteration in (0, 1, 2):
        wait_for(tmp_path / "three" / "run" / "checkpoints" / f"{iteration:06d}", process)
        os.kill(samplers()[0], signal.SIGKILL)
    said = process.communicate()[0]
    assert process.returncode == 0, said[-2000:]
    assert outcome(tmp_path / "three" / "run") == want
    again = begun(pipeline, tmp_path / "again", CHAIN, sampling=1, lag=1)
    process = subprocess.Popen(again, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(tmp_path / "again" / "run" / "checkpoints" / "000002", process)
    process.kill()
    process.wait()
    resumed = [*again[:4], "--resume", str(tmp_path / "again" / "run"), "--workers.sampling", "2"]
    assert finished(resumed, tmp_path / "again") == want


def samplers() -> list[int]:
    """Process ids of the sampling workers, which Ray names by their class."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if "ray::SamplingWorker" in line]


def wait_for(path: Path, process: subprocess.Popen) -> None:
    began = time.monotonic()
    while not path.exists():
        assert process.poll() is None and time.monotonic() - began < 400
        time.sleep(0.2)
