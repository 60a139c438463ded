"""Measure what one test and one program cost in the sandbox, of several source trees in turns.

    python scripts/benchmarks/sandbox_cost.py --trees before=/tmp/older after=.

A test is `run_tests` of one assertion (two processes), a program is `run_program` of `print(1)`.
Each tree has a process of its own; the turns alternate, so that a busy machine is equally busy for
all. The table has medians with the middle half, and each median against the first tree's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

WORKER = """
import json, sys, time
from rewards.sandbox import run
limits = run.SandboxLimits()
def test():
    found = run.run_tests("def f(x): return x + 1", ["assert f(2) == 3"], limits)
    assert found[0] == [True]
def program(): assert run.run_program("print(1)", "", limits).output == "1\\n"
for work in (test, program, test, program): work()
print("ready", flush=True)
for line in sys.stdin:
    work = test if line == "test\\n" else program
    began = time.perf_counter()
    work()
    print(json.dumps(1000 * (time.perf_counter() - began)), flush=True)
"""


class Tree:
    """A process that measures one tree."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": str(folder.resolve())},
        )  # fmt: skip
        assert self._line() == "ready"
        self.times: dict[str, list[float]] = {"test": [], "program": []}

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def measure(self, kind: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{kind}\n")
        self.process.stdin.flush()
        self.times[kind].append(json.loads(self._line()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", nargs="+", required=True, help="NAME=FOLDER")
    parser.add_argument("--turns", type=int, default=40)
    given = parser.parse_args()
    named = dict(each.split("=", 1) for each in given.trees)
    trees = {name: Tree(Path(folder)) for name, folder in named.items()}
    for turn in range(given.turns):
        order = list(trees.values())
        for tree in order if turn % 2 else reversed(order):
            for kind in ("test", "program"):
                tree.measure(kind)
    first = next(iter(trees.values()))
    print("| | tree | median, ms | middle half | fastest | against the first |")
    print("|---|---|---|---|---|---|")
    for kind in ("test", "program"):
        base = statistics.median(first.times[kind])
        for name, tree in trees.items():
            low, middle, high = statistics.quantiles(tree.times[kind], n=4)
            fastest = min(tree.times[kind])
            ratio = f"{middle / base:.2f} (fastest {fastest / min(first.times[kind]):.2f})"
            numbers = f"{middle:.0f} | {low:.0f} to {high:.0f} | {fastest:.0f}"
            print(f"| {kind} | {name} | {numbers} | {ratio} |")


if __name__ == "__main__":
    main()
