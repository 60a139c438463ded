"""Workers on two Ray nodes of this machine: the bits of the run in one process, whatever happens to
them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.paths import PROJECT
from tests.support.runs import environment
from tests.support.worker_runs import RECIPES

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def check(*words: str, out: Path) -> None:
    """Run scripts/benchmarks/workers.py, which fails where an end has other bits."""
    command = [sys.executable, "scripts/benchmarks/workers.py", *words, "--out", str(out)]
    done = subprocess.run(command, cwd=PROJECT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.parametrize("recipe", RECIPES)
def test_workers_change_no_bit(recipe, tmp_path):
    """1, 2 and 3 workers, and a reward in replicas; bytes as planned."""
    check("bits", "--only", f"{recipe}-lag0", "--iterations", "2", out=tmp_path)


@pytest.mark.parametrize("lag", [1, 2])
def test_a_lag_is_of_the_run_and_not_of_its_timing(lag, tmp_path):
    """One worker, three, and three of which one is killed."""
    check("bits", "--only", f"flow_grpo-lag{lag}", out=tmp_path)


def test_kills_change_nothing(tmp_path):
    """An eighth of the 60, at every place, and a worker that hangs."""
    check("kills", "--kills", "8", "--hung", "1", "--iterations", "12", out=tmp_path)


def test_workers_are_as_important_as_training_unless_the_user_has_set_it(monkeypatch):
    from flowrl.run.workers.cluster import NICENESS, RAY_OPTIONS, priority

    monkeypatch.setenv(NICENESS, "7")
    assert priority("local") == {} == priority("auto")
    monkeypatch.delenv(NICENESS)
    ray.init(address="local", **RAY_OPTIONS, **priority("local"))
    try:
        nice = ray.remote(num_cpus=0)(lambda: os.nice(0)).remote()
        assert ray.get(nice) == os.nice(0)
    finally:
        ray.shutdown()
