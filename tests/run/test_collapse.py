"""A run that is made to collapse on the demo's world, as a user would see it. Minutes: slow."""

import json
import subprocess
import sys

import pytest

from flowrl.paths import PROJECT


@pytest.mark.slow
def test_a_collapse_is_told_before_accuracy_has_halved(tmp_path):
    folder = tmp_path / "run"
    words = ["train", str(PROJECT / "configs" / "demo_flow_grpo.yaml"), "--folder", str(folder)]
    words += ["--train.lr", "1e-3", "--recipe.kl", "0", "--train.iterations", "70"]
    words += ["--evaluate.every", "3", "--evaluate.samples", "256", "--checkpoint.every", "70"]
    command = [sys.executable, "-m", "flowrl", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROJECT)
    assert "the run may be collapsing: " in done.stderr
    assert "Lower train.lr (now 0.001" in done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    alarm = next(line["iteration"] for line in lines if line.get("alarms"))
    held = {
        line["iteration"]: line["held_out/shapes.strict"]
        for line in lines
        if "held_out/shapes.strict" in line
    }
    low = min(held.values())
    assert low < 0.75 * held[0], "it did not collapse, so the test says nothing"
    assert all(value > 0.5 * held[0] for at, value in held.items() if at <= alarm)
    best = max(held, key=lambda at: held[at])
    assert [p.name for p in (folder / "best").iterdir()] == [f"{best:06d}"]
