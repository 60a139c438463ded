"""CPU seconds from the start of `flowrl train` to its first iteration, on the tiny pipeline.

    python scripts/benchmarks/suites.py --suites start

Four processes by turns: `import torch` alone, the other imports of the pipeline alone, a start that
proves the model, and one that finds the proof kept. The first is subtracted from the others.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

TORCH = "import time, torch; print('CPU', time.process_time())"
# The imports of the pipeline itself.
LIBRARIES = """
import time
import accelerate, peft
from diffusers import StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection, CLIPTokenizer
print("CPU", time.process_time())
"""
# The command line's own imports; the process ends where the first iteration would begin.
START = """
import builtins, os, sys, time
real = builtins.__import__
def first(*_):
    print("CPU", time.process_time(), flush=True)
    os._exit(0)
def importing(name, *rest, **named):
    found = real(name, *rest, **named)
    if name == "flowrl.run.start":
        sys.modules["flowrl.run.train"].iterate = first
        builtins.__import__ = real
    return found
builtins.__import__ = importing
from flowrl.cli import main
main(["train", *sys.argv[1:]])
"""
GOALS = {"kept proof": 3.0, "cold proof": 6.0}


def seconds(words: list[str], cache: Path) -> float:
    """CPU seconds of a process of one thread, by its own clock."""
    environment = {
        **os.environ, "FLOWRL_CACHE": str(cache), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(PROJECT),
    }  # fmt: skip
    command = [sys.executable, "-c", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("CPU ")]
    if not lines:
        raise SystemExit(done.stdout[-1000:] + done.stderr[-2000:])
    return float(lines[-1].split()[1])


def configured(folder: Path) -> Path:
    """Write the tiny pipeline and a run of it."""
    from tests.support import runs

    runs.write_pipeline(folder / "pipeline")
    settings = runs.tree(folder / "pipeline", folder, runs.FLOW_GRPO, iterations=1)
    return runs.write(settings, folder)


def measured(repeats: int) -> dict[str, Any]:
    """Seconds of each kind of start, without those of `import torch`, and the latter."""
    kinds = ("import torch", "libraries", "cold proof", "kept proof")
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = configured(folder)
        for turn in range(repeats):
            torch = seconds([TORCH], folder)
            found["import torch"].append(torch)
            found["libraries"].append(seconds([LIBRARIES], folder) - torch)
            cache = folder / f"cache{turn}"
            for kind in ("cold proof", "kept proof"):
                run = folder / f"run{turn}{kind[0]}"
                words = [START, str(file), "--folder", str(run)]
                found[kind].append(seconds(words, cache) - torch)
    return {"seconds": found, "goals": GOALS}
