"""Time an iteration of a learner with a sampling worker beside one process, on two idle cores.

    python scripts/benchmarks/worker_times.py --out runs/worker_times

Each process has one thread but where two are named. One process has the same units and lag, so that
it must end with the same weights, and its halves are the seconds of sampling and of the update.
Two processes share caches and memory: `update beside another run` is the update of one of two runs
at a time that have nothing to do with each other, below which a learner beside a worker cannot be.
`balanced` is NFT with as many steps of sampling as make both equal. The last
rows have a judge that answers after two seconds, in replicas, by lag. Seconds are medians of the
iterations in which both sides work: not the first ones, and not the last.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import median

from experiment import read

from flowrl.paths import PROJECT

QUIET = (
    "--prompts.held-out", "null",
    "--track.images", "0",
    "--train.alarms", "off",
    "--checkpoint.every", "100",
    "--train.self-test", "off",
)  # fmt: skip
JUDGE = '''
import time


def judge(samples):
    """Answers after two seconds."""
    time.sleep(2)
    return [float(x.mean()) for x in samples.media]
'''


class Bench:
    def __init__(self, out: Path, iterations: int, smaller: Sequence[str], threads: bool) -> None:
        self.out, self.iterations, self.smaller, self.threads = out, iterations, smaller, threads
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)

    def start(self, name: str, words: Sequence[str], threads: int) -> subprocess.Popen[bytes]:
        folder = self.out / name
        command = [sys.executable, "-m", "flowrl", "train", *words, *QUIET, *self.smaller]
        command += ["--train.iterations", str(self.iterations), "--folder", str(folder)]
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(command, env=env, cwd=PROJECT, stdout=subprocess.DEVNULL)

    def run(
        self, name: str, words: Sequence[str], threads: int = 1, other: bool = False
    ) -> dict[str, float]:
        """Median of each metric over the iterations in which both sides work. `other`: beside
        another process of the same run, which has nothing to do with it."""
        folder, both = self.out / name, [name, f"{name}-other"][: 1 + other]
        started = [self.start(each, words, threads) for each in both]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"{name} has failed")
        rows = read(folder)[-self.iterations :][2:-1]
        return {key: median(row[key] for row in rows if key in row) for key in rows[0]}


def halves(found: dict[str, float]) -> tuple[float, float]:
    return found["seconds"] - found["seconds/update"], found["seconds/update"]


def weights(folder: Path) -> list[str]:
    """Digests of the exported weights."""
    files = sorted(folder.glob("pipeline/**/*.safetensors"))
    return [hashlib.sha256(each.read_bytes()).hexdigest() for each in files]


def beside_one(bench: Bench, name: str, words: Sequence[str]) -> str:
    """A row: one process, a worker at lag 1, and one process of two threads."""
    words = [*words, "--workers.unit", "4", "--workers.lag", "1"]
    one = bench.run(f"{name}-one", words)
    lag = bench.run(f"{name}-beside", [*words, "--workers.sampling", "1"])
    same = weights(bench.out / f"{name}-one") == weights(bench.out / f"{name}-beside") != []
    two = bench.run(f"{name}-threads", words, threads=2) if bench.threads else {"seconds": nan}
    sample, update = halves(one)
    _, shared = halves(bench.run(f"{name}-shared", words, other=True))
    return (
        f"| {name} | {sample:.2f} + {update:.2f} = {one['seconds']:.2f} | {lag['seconds']:.2f} | "
        f"{lag['seconds'] / max(sample, update):.2f} | {lag['seconds'] / one['seconds']:.2f} | "
        f"{two['seconds']:.2f} | {lag['seconds/update']:.2f} | {shared:.2f} | "
        f"{'yes' if same else 'no'} |"
    )


def balanced(bench: Bench, words: Sequence[str], steps: int) -> list[str]:
    """The settings with as many steps of sampling as take what the update takes."""
    sample, update = halves(
        bench.run("balance", [*words, "--workers.unit", "4", "--workers.lag", "1"])
    )
    return [*words, "--recipe.steps", str(max(2, round(steps * update / sample)))]


def waiting(bench: Bench, words: Sequence[str], lag: int) -> str:
    """A row: the shares of an iteration that training waits with a slow judge."""
    file = bench.out / "judge.py"
    file.write_text(JUDGE)
    more = ["--rewards", json.dumps([{"name": f"{file}:judge"}]), "--workers.unit", "4"]
    more += ["--workers.sampling", "1"]
    more += ["--workers.rewards", json.dumps({"judge": {"replicas": 4}})]
    found = bench.run(f"judge-{lag}", [*words, *more, "--workers.lag", str(lag)])
    parts = [
        found[f"seconds/waiting/{kind}"] / found["seconds"] for kind in ("sampling", "scoring")
    ]
    return f"| {lag} | {found['seconds']:.2f} | {parts[0]:.1%} | {parts[1]:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=PROJECT / "runs" / "worker_times")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--lags", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="*", default=["flow_grpo", "nft", "balanced"])
    parser.add_argument("--no-threads", action="store_true", help="leave out two threads")
    parser.add_argument("smaller", nargs="*", help="settings for all runs, such as a smaller group")
    given = parser.parse_args()
    bench = Bench(given.out, given.iterations, given.smaller, not given.no_threads)
    columns = ("run", "one process: sample + update", "beside, lag 1", "of the longer half")
    columns += ("of one process", "two threads", "its update", "update beside another run")
    columns += ("same weights",)
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    if "flow_grpo" in given.rows:
        print(beside_one(bench, "flow_grpo", ["configs/demo_flow_grpo.yaml"]), flush=True)
    if "nft" in given.rows:
        print(beside_one(bench, "nft", ["configs/demo.yaml"]), flush=True)
    if "balanced" not in given.rows and not given.lags:
        return
    equal = balanced(bench, ["configs/demo.yaml"], 7)
    if "balanced" in given.rows:
        print(f"{equal[-2]} {equal[-1]}\n" + beside_one(bench, "balanced", equal), flush=True)
    print("\n| lag | seconds | training waits for samples | for scores |\n" + "|---" * 4 + "|")
    for lag in given.lags:
        print(waiting(bench, equal, lag), flush=True)


if __name__ == "__main__":
    main()
