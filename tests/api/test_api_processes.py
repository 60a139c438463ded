"""A script that calls `flowrl.train`, under torchrun and accelerate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from flowrl.paths import PROJECT
from tests.support.runs import lines

SCRIPT = """
import json
import sys

import flowrl


def red(samples):
    return samples.media[:, 0].flatten(1).mean(1) - samples.media[:, 2].flatten(1).mean(1)


if __name__ == "__main__":
    folder, seen = sys.argv[1], []
    run = flowrl.train(
        "flowrl/demo/shapes-sd3",
        rewards=[red],
        prompts=["a red circle", "a blue square", "a green circle"],
        held_out=["a red square", "a green square"],
        recipe=flowrl.recipe("flow_grpo", steps=4, group=4, eta=1.0),
        lora=False,
        iterations=1,
        folder=folder,
        callbacks=[lambda event: seen.append(event.kind)],
        settings={
            "model": {"call": {"max_sequence_length": 1}},
            "prompts": {"per_iteration": 2},
            "evaluate": {"samples": 4, "per_prompt": 2},
            "track": {"images": 0},
            "train": {"lr": 1e-4},
        },
    )
    run = flowrl.train(resume=folder, rewards=[red], iterations=2)
    held_out = run.evaluate(["a red circle"], samples=2).metrics
    found = json.dumps([len(run.metrics), len(seen), held_out["red"]])
    print(f"RESULT{found}\\n", end="", flush=True)  # in one piece, beside the other process
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH = ("-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu")


def script(folder: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    own = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    words = [sys.executable, *launcher, "script.py", "run"]
    return subprocess.run(words, cwd=folder, env=os.environ | own, capture_output=True, text=True)


@pytest.mark.slow
def test_two_processes_train_again_and_have_the_numbers_of_one(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("one", "two")}
    results = {}
    for (name, folder), launcher in zip(folders.items(), ((), TORCHRUN), strict=True):
        folder.mkdir()
        done = script(folder, *launcher)
        assert done.returncode == 0, done.stdout + done.stderr
        said = [x for x in done.stdout.splitlines() if x.startswith("RESULT")]
        results[name] = [json.loads(line.removeprefix("RESULT")) for line in said]
    (one,), two = results["one"], sorted(results["two"], key=lambda each: each[1])
    assert "2 processes, DDP" in done.stdout and len(two) == 2
    assert [each[0] for each in (one, *two)] == [3, 3, 3]  # the base is the first line
    assert two[0][1] == 0 and two[1][1] == one[1] == 5  # callbacks are called on the main process
    assert all(each[2] == pytest.approx(one[2], abs=1e-5) for each in two)
    same = ("reward", "reward_std", "grad_norm", "held_out/red", "lr")
    for a, b in zip(*(lines(folder / "run") for folder in folders.values()), strict=True):
        assert {n: b[n] for n in same if n in b} == pytest.approx(
            {n: a[n] for n in same if n in a}, rel=1e-4, abs=1e-6
        )
    weights = [load_file(next((f / "run").glob("pipeline/transformer/*.safetensors")))
               for f in folders.values()]  # fmt: skip
    assert all(
        (weights[0][n] - weights[1][n]).abs().max() < 2e-5 for n in weights[0]
    )  # a step is 1e-4


@pytest.mark.slow
def test_a_launcher_that_starts_fewer_processes_is_refused(tmp_path: Path) -> None:
    done = script(tmp_path, *LAUNCH)
    assert done.returncode != 0 and not list(tmp_path.glob("run/metrics.jsonl"))
    assert "accelerate launch was given 2 processes, but this run has 1" in done.stderr
