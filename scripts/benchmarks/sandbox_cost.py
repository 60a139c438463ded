"""Measure what one test and one program cost in the sandbox, of several source trees in turns.

    python scripts/benchmarks/sandbox_cost.py --trees before=/tmp/older after=.

A test is `run_tests` of one assertion (two processes), a program is `run_program` of `print(1)`.
Each tree has a process of its own; the turns alternate, so that a busy machine is equally busy for
all. The table has medians with the middle half, of the time that passes and of the processors' time
of all processes, and each median against the first tree's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

WORKER = """
import json, resource, sys, time
from rewards.sandbox import run
limits = run.SandboxLimits()
def test():
    found = run.run_tests("def f(x): return x + 1", ["assert f(2) == 3"], limits)
    assert found[0] == [True]
def program(): assert run.run_program("print(1)", "", limits).output == "1\\n"
for work in (test, program, test, program): work()
print("ready", flush=True)
def spent():
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
for line in sys.stdin:
    work = test if line == "test\\n" else program
    began, before = time.perf_counter(), spent()
    work()
    passed = time.perf_counter() - began
    print(json.dumps([1000 * passed, 1000 * (spent() - before)]), flush=True)
"""


KINDS, CLOCKS = ("test", "program"), ("passed", "processors")


class Tree:
    """A process that measures one tree."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": str(folder.resolve())},
        )  # fmt: skip
        assert self._line() == "ready"
        self.times: dict[tuple[str, str], list[float]] = {
            (kind, clock): [] for kind in KINDS for clock in CLOCKS
        }

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def measure(self, kind: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{kind}\n")
        self.process.stdin.flush()
        for clock, milliseconds in zip(CLOCKS, json.loads(self._line()), strict=True):
            self.times[kind, clock].append(milliseconds)


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
            for kind in KINDS:
                tree.measure(kind)
    first = next(iter(trees.values()))
    print("| | time | tree | median, ms | middle half | fastest | against the first |")
    print("|---|---|---|---|---|---|---|")
    for kind, clock in first.times:
        times = first.times[kind, clock]
        base, quickest = statistics.median(times), min(times)
        for name, tree in trees.items():
            low, middle, high = statistics.quantiles(tree.times[kind, clock], n=4)
            fastest = min(tree.times[kind, clock])
            ratio = f"{middle / base:.2f} (fastest {fastest / quickest:.2f})"
            numbers = f"{middle:.0f} | {low:.0f} to {high:.0f} | {fastest:.0f}"
            print(f"| {kind} | {clock} | {name} | {numbers} | {ratio} |")


if __name__ == "__main__":
    main()
