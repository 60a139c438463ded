"""Models of published size start, prove themselves and train on a CPU: random weights."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RUNS = {
    "sd35": ("--guidance", "5", "--height", "128", "--width", "128"),
    "sdxl": ("--guidance", "5", "--height", "128", "--width", "128"),
    "wan": ("--guidance", "5", "--height", "96", "--width", "96"),
    "text": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_real_size_trains_within_its_estimate(name):
    command = [sys.executable, ROOT / "scripts" / "benchmarks" / "real_sizes.py", name, *RUNS[name]]
    told = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    lines = told.stdout + told.stderr[-2000:]
    assert f"{name}: exit code 0" in lines, lines
    share = re.search(r"([0-9.]+) of it\)", lines)
    assert share is not None and 2 / 3 <= float(share[1]) <= 4 / 3, lines
    assert "adapter in a plain pipeline: loaded" in lines, lines
