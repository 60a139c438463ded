"""Killed at any moment and resumed, a run ends as if nothing had happened: to the bit."""

import subprocess
import sys

import pytest

from flowrl.paths import PROJECT
from tests.support.runs import environment


@pytest.mark.slow
def test_random_kills_change_nothing(tmp_path):
    """A quarter of the 200: every recipe there, one process and two, and edits of each kind."""
    words = ["scripts/benchmarks/kills.py", "--out", str(tmp_path), "--scale", "0.25"]
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=PROJECT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["supervisor", "torchrun", "agents", "accelerate"])
def test_two_deaths_under_a_launcher_change_nothing(tmp_path, launcher):
    """One trial of the benchmark, whose moments of death depend on the machine."""
    words = ["scripts/benchmarks/launchers.py", "--out", str(tmp_path), "--minutes", "0.001"]
    command = [sys.executable, *words, "--only", launcher, "--how", "kill"]
    done = subprocess.run(command, cwd=PROJECT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert f"| {launcher} | kill | 1 | 2 | 1 | 1 |" in done.stdout
