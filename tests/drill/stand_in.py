"""A training of a second for tests of the drill: `python stand_in.py train --resume FOLDER`.

It keeps what flowrl promises, or, named in the file `breaks` beside the run's weights, breaks one
promise: `hangup` (SIGHUP ends it unsaved), `second` (it hangs after its second death), `orphan` (it
outlives its supervisor), `bits` (a resume ends otherwise), `silent` (a missing line is not named),
`nan` (metrics.jsonl has one), `disk` (a full disk is a trace). With `told`, a process beside it
says that it is stopped, as one that waits for it does.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import yaml
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

SECONDS = 0.15  # per iteration
BESIDE = """
import sys, time
while True:
    time.sleep(0.02)
    with open(f"/proc/{sys.argv[1]}/stat") as file:
        if file.read().rpartition(")")[2].split()[0] == "T":
            print(f"flowrl: process 1 has waited 60 s for process 0: `kill -CONT {sys.argv[1]}`")
            break
"""
asked = 0


def ask(number: int, _: object) -> None:
    global asked
    asked = number


def write(folder: Path, weights: np.ndarray) -> None:
    beside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    save_file({"w": weights}, beside / "policies.safetensors")
    (beside / "optimizer.pt").write_bytes(bytes(2**17))
    time.sleep(0.03)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def train(folder: Path, broken: str, resumed: bool) -> int:
    signal.signal(signal.SIGTERM, ask)
    if broken == "told":
        subprocess.Popen([sys.executable, "-u", "-c", BESIDE, str(os.getpid())])
    if broken != "hangup":
        signal.signal(signal.SIGHUP, ask)
    last = yaml.safe_load((folder / "run.yaml").read_text())["train"]["iterations"]
    saved = sorted((folder / "checkpoints").glob("[0-9]*"))
    first = int(saved[-1].name) if saved else 0
    weights = load_file(saved[-1] / "policies.safetensors")["w"] if saved else np.zeros(4)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["iteration"] <= first]
    if [line["iteration"] for line in kept] != list(range(first + 1)) and broken != "silent":
        print("flowrl: metrics.jsonl lacks a line", file=sys.stderr)
        return 2
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    if broken == "bits" and resumed:
        weights = weights + 1e-7
    for iteration in range(first + 1, last + 1):
        time.sleep(SECONDS)
        weights = weights * 1.5 + iteration
        value = float("nan") if broken == "nan" else float(weights[0])
        line = {"iteration": iteration, "loss": value, "seconds": time.time()}
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        if iteration % 2 == 0 or asked:
            write(folder / "checkpoints" / f"{iteration:06d}", weights)
        if asked:
            return 128 + asked
    (folder / "adapter").mkdir(exist_ok=True)
    save_file({"w": weights}, folder / "adapter" / "adapter.safetensors")
    return 0


def supervise(words: list[str], restarts: int, broken: str) -> int:
    import ctypes

    for attempt in range(restarts + 1):
        child = os.fork()
        if not child:
            if broken != "orphan":  # the supervisor's end is a request to end
                ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
            if broken == "second" and attempt == 2:
                time.sleep(600)
            os.execv(sys.executable, [sys.executable, *sys.argv[:1], "flowrl", "train", *words])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code in (0, 2):
            return code
    return 1


def main() -> int:
    words = sys.argv[sys.argv.index("train") + 1 :]
    folder = Path(words[words.index("--resume") + 1])
    broken = (folder / "breaks").read_text() if (folder / "breaks").exists() else ""
    if "--restarts" in words:
        at = words.index("--restarts")
        return supervise(words[:at] + words[at + 2 :], int(words[at + 1]), broken)
    resumed = folder.name != "unbroken"
    failed = 1 if "--nproc-per-node" in sys.argv else 3  # a launcher has a code of its own
    try:
        return train(folder, broken, resumed)
    except (OSError, SafetensorError) as error:
        full = "os error 28" in str(error) or getattr(error, "errno", None) == errno.ENOSPC
        if not full or broken == "disk":
            raise
        print("flowrl: the disk is full", file=sys.stderr)
        return failed


if __name__ == "__main__":
    sys.exit(main())
