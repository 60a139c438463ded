"""Runs with workers on two local Ray nodes, disturbed and killed, beside the run in one process.

    python scripts/benchmarks/workers.py bits --out runs/workers
    python scripts/benchmarks/workers.py kills --out runs/workers --kills 60

`bits`: recipes with 1, 2 and 3 sampling workers at lag 0, with 2 also a reward in replicas; some at
lag 1 and 2, also with a worker that is killed. `kills`: SIGKILL at random moments to a sampling
worker, a scoring worker, a node, and the learner or the head, with which the run ends, and then it
is resumed; SIGSTOP to a worker, which then passes its limit. Every end is compared to the bit with
the run of the same units and lag in one process: weights, averages, optimizer, metrics but seconds
and counts of workers, pages of samples. Learners are forked from a process that has imported
everything, and one Ray cluster serves many runs.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from flowrl.estimate.workers import traffic
from flowrl.paths import PROJECT
from flowrl.settings.read import read_run
from tests.support import runs
from tests.support.warm import Process
from tests.support.worker_runs import LIMIT, RECIPES, Bench, Case, differences

PLACES = ("sampler", "scorer", "node", "learner", "sampler", "scorer", "sampler", "head")
ENDS = ("learner", "head")  # the run ends with them, and is resumed
GONE = 20.0  # seconds in which workers end after their learner
SPAN = 6.0  # seconds between two kills, at most


def bits_cases() -> Iterator[Case]:
    for recipe in RECIPES:
        yield from (Case(recipe, 0, 1), Case(recipe, 0, 2, 1), Case(recipe, 0, 3))
    for recipe in ("flow_grpo", "nft", "text_grpo"):
        for lag in (1, 2):
            yield from (Case(recipe, lag, 1), Case(recipe, lag, 3))
            yield Case(recipe, lag, 3, disturbed=True)


def wrong_bytes(folder: Path, case: Case) -> str:
    """Compare what the actors of a run have sent with what `flowrl plan` says. With a lag some
    iterations send no weights, and media are sent again where a worker was lost."""
    run, (_, *lines) = read_run(folder / "run.yaml"), runs.lines(folder)
    planned = traffic(run)
    assert planned is not None
    wanted = {"samples": planned.samples} | ({} if case.lag else {"weights": planned.weights})
    wanted |= {} if case.disturbed else {"media": planned.media if case.replicas else 0}
    for line in lines:
        sent = {kind: line[f"workers/bytes/{kind}"] for kind in wanted}
        if any(sent[k] > wanted[k] or (sent[k] < wanted[k] and not planned.bound) for k in wanted):
            return f"bytes {sent}, planned {wanted}"
    return ""


def bits(bench: Bench, only: str) -> list[str]:
    """Run every case beside the same units in one process. Returns what is wrong."""
    wrong = list[str]()
    for case in bits_cases():
        if only not in case.name or (bench.out / f"{case.name}.json").exists():
            continue
        began = time.monotonic()
        wanted, folder = bench.reference(case.recipe, case.lag), bench.place(case.name)
        out = folder.parent / "out.txt"
        words = (bench.config(case.recipe, case.lag), "--folder", folder)
        process = bench.start(*words, *case.options(bench.nodes.address), out=out)
        if case.disturbed:
            while not (folder / "checkpoints" / "000001").exists() and process.running():
                time.sleep(0.05)
            os.kill(bench.nodes.workers("SamplingWorker")[0], signal.SIGKILL)
        codes = process.wait()
        found = differences(folder, wanted) if codes == [0] else f"exit codes {codes}"
        found = found or wrong_bytes(folder, case)
        restarts = 0.0 if found else runs.lines(folder)[-1]["workers/restarts"]
        if restarts and not case.disturbed:  # a worker that is killed before it joins is none
            found = found or f"{restarts} restarts"
        wrong += [f"{case.name}: {found}\n{out.read_text()[-2500:]}"] if found else []
        row = [*case, "no" if found else "yes", round(time.monotonic() - began, 1)]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
        if not found:
            (bench.out / f"{case.name}.json").write_text(json.dumps(row))
    return wrong


KILLED = (
    Case("flow_grpo", 1, 2, 1),
    Case("text_grpo", 1, 2, 1),
    Case("nft", 2, 2, 1),
    Case("branch_grpo", 0, 3, 2),
)


class Killing:
    """Kills in runs of one case after another, counted by place."""

    def __init__(self, bench: Bench, seed: int, first: int) -> None:
        self.bench, self.rng, self.first = bench, random.Random(f"{seed} {first}"), first
        self.kills: dict[str, int] = dict.fromkeys((*PLACES, "hung"), 0)
        self.ends, self.equal, self.resumed, self.longest = 0, 0, 0, 0.0
        self.wrong = list[str]()

    def go(self, kills: int, hung: int) -> None:
        for number in count(self.first):
            left = kills + hung - sum(self.kills.values())
            if left <= 0 or self.wrong:
                return
            self.run(KILLED[number % len(KILLED)], number, kills, hung)

    def place(self, kills: int, hung: int) -> str | None:
        """The next place; workers hang last."""
        done = sum(self.kills.values())
        if done >= kills + hung:
            return None
        return PLACES[(self.first + done) % len(PLACES)] if done < kills else "hung"

    def run(self, case: Case, number: int, kills: int, hung: int) -> None:
        bench, folder = self.bench, self.bench.place(f"killed-{number}")
        wanted, out = bench.reference(case.recipe, case.lag), folder.parent / "out.txt"
        while True:
            first = (bench.config(case.recipe, case.lag), "--folder", folder)
            begun = (folder / "run.yaml").exists()
            words = ("--resume", folder, "--trust") if begun else first
            process = bench.start(*words, *case.options(bench.nodes.address), out=out)
            self.resumed += begun
            if self.disturb(process, folder, kills, hung) not in ENDS:
                break
        codes = process.codes()
        self.ends += 1
        found = differences(folder, wanted) if codes == [0] else f"exit codes {codes}"
        if found:
            self.wrong.append(f"{case.name}, {folder}: {found}\n{out.read_text()[-2500:]}")
        else:
            self.equal += 1
        print(f"{case.name}: {self.kills}, {self.ends} ends, {self.equal} equal, longest wait "
              f"{self.longest:.0f} s", flush=True)  # fmt: skip

    def disturb(self, process: Process, folder: Path, kills: int, hung: int) -> str | None:
        """Kill until the run ends. Returns the last place if the run ended with it."""
        while process.running():
            moment = time.monotonic() + self.rng.uniform(0, SPAN)
            if not self.watched(process, folder, moment):
                return None
            place = self.place(kills, hung)
            if place is None:
                if not self.watched(process, folder, None):
                    return None
            elif self.killed(place, process):
                self.kills[place] += 1
                print(f"{folder.parent.name}: killed a {place}", flush=True)
                if place in ENDS:
                    self.gone(place, process)
                    return place
        return None

    def watched(self, process: Process, folder: Path, moment: float | None) -> bool:
        """Wait until a moment, or for the end of the run; False if it has ended. Keeps the longest
        time without a new line."""
        file = folder / "metrics.jsonl"
        seen, since = -1, time.monotonic()
        while process.running():
            size = file.stat().st_size if file.exists() else 0
            seen, since = (size, time.monotonic()) if size != seen else (seen, since)
            self.longest = max(self.longest, time.monotonic() - since)
            if time.monotonic() - since > 2 * LIMIT:
                self.wrong.append(f"{folder} hangs")
                process.kill()
            if moment is not None and time.monotonic() >= moment:
                return True
            time.sleep(0.02)
        return False

    def killed(self, place: str, process: Process) -> bool:
        """Kill what is at a place; False if nothing is there at this moment."""
        nodes = self.bench.nodes
        if place == "learner":
            process.kill()
        elif place == "node":
            nodes.kill_other()
        elif place == "head":
            nodes.kill_head()
        else:
            kind = "ScoringWorker" if place == "scorer" else "SamplingWorker"
            found = nodes.workers(kind)
            if not found:
                return False
            how = signal.SIGSTOP if place == "hung" else signal.SIGKILL
            os.kill(self.rng.choice(found), how)
        return True

    def gone(self, place: str, process: Process) -> None:
        """Wait for the end of a run after its learner's death, and its workers', or the head's."""
        if process.wait() == [None]:
            self.wrong.append(f"a learner outlives the {place}")
            process.kill()
        if place == "head":
            self.bench.fresh_nodes()
            return
        nodes, end = self.bench.nodes, time.monotonic() + GONE
        while nodes.workers() and time.monotonic() < end:
            time.sleep(0.1)
        if nodes.workers():
            self.wrong.append(f"workers {nodes.workers()} outlive their learner")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("what", choices=("bits", "kills"))
    parser.add_argument("--out", type=Path, default=PROJECT / "runs" / "workers")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--only", default="", help="cases with this in their name: nft-lag0-2-2")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--hung", type=int, default=2)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--first", type=int, default=0, help="the first case and place of kills")
    given = parser.parse_args()
    bench = Bench(given.out, given.iterations)
    try:
        if given.what == "bits":
            wrong = bits(bench, given.only)
        else:
            killing = Killing(bench, given.seed, given.first)
            killing.go(given.kills, given.hung)
            wrong = killing.wrong
            print(
                f"kills {killing.kills}, resumes {killing.resumed}, ends {killing.ends}, equal to "
                f"the bit {killing.equal}; longest time without a line {killing.longest:.0f} s"
            )
    finally:
        bench.close()
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
