"""Kill or stop processes of runs twice under every launcher that restarts them, and compare the end
with that of an unbroken run.

    python scripts/benchmarks/launchers.py --out runs/launchers --minutes 30

A trial is a launcher, the process that is hit, and how: `kill` sends SIGKILL, `stop` sends SIGSTOP,
so that the process hangs instead of dying, and its run ends it after `--limit` seconds. A process
is hit twice, the second time in the restarted attempt. Half of the moments are chosen while the
processes start and meet, half while they train; each moment is another one. Weights, averages,
optimizer states, the best weights and all metrics but seconds are compared to the bit.

Every trial is appended to `trials.jsonl`; started again, the script goes on after the last one.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from flowrl.paths import PROJECT
from tests.support import runs
from tests.support.warm import agree, small

RESTARTS = "5"  # more than two: one death may count on both nodes
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--max-restarts", RESTARTS)
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--max_restarts", RESTARTS)
NAMES = ("supervisor", "torchrun", "agents", "accelerate")
FAILED = 600.0  # seconds after which a trial has hung


@dataclass(frozen=True)
class Trial:
    launcher: str
    rank: int  # of the process that is hit
    how: str  # kill or stop
    number: int


@dataclass
class Outcome:
    hits: int = 0
    ended: bool = False
    equal: bool = False
    seconds: float = 0.0
    wrong: str = ""


def commands(launcher: str, words: list[str], processes: int) -> list[list[str]]:
    """The commands that start a run of several processes, or of one under flowrl's own
    --restarts."""
    flowrl = ["-m", "flowrl", "train", *words]
    if launcher == "supervisor":
        return [[sys.executable, *flowrl, "--restarts", RESTARTS]]
    if launcher == "torchrun":
        return [[*TORCHRUN, "--standalone", "--nproc-per-node", str(processes), *flowrl]]
    if launcher == "accelerate":
        config = str(PROJECT / "configs/accelerate/ddp_cpu_2.yaml")
        count_of = ["--num_processes", str(processes)]
        return [[*ACCELERATE, "--config_file", config, *count_of, *flowrl]]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{runs.free_port()}"]
    agent = [
        *TORCHRUN,
        "--nnodes",
        "2",
        "--nproc-per-node",
        str(processes // 2),
        "--rdzv-id",
        "two",
        *meeting,
    ]
    return [[*agent, "--local-addr", "127.0.0.1", *flowrl] for _ in range(2)]


class Started:
    """The processes of a trial: launchers, and the training processes below them."""

    def __init__(
        self,
        launcher: str,
        words: list[str],
        out: Path,
        env: Mapping[str, str],
        processes: int,
    ) -> None:
        self.launcher, self.out = launcher, out
        environment = runs.environment() | {"PYTHONPATH": str(PROJECT), **env}
        self.parents = [
            subprocess.Popen(
                command,
                env=environment,
                cwd=PROJECT,
                stdout=out.with_suffix(f".{place}.txt").open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for place, command in enumerate(commands(launcher, words, processes))
        ]

    def below(self) -> Iterator[psutil.Process]:
        for parent in self.parents:
            with suppress(psutil.Error):
                yield from psutil.Process(parent.pid).children(recursive=True)

    def process(self, rank: int, known: set[int]) -> int | None:
        """The training process of a rank, if it is not a known one of an earlier attempt."""
        for each in self.below():
            with suppress(psutil.Error):
                own = self.launcher == "supervisor" or each.environ().get("RANK") == str(rank)
                if each.pid not in known and own and "train" in each.cmdline():
                    return each.pid
        return None

    def running(self) -> bool:
        return any(parent.poll() is None for parent in self.parents)

    def said(self) -> str:
        texts = [p.read_text() for p in sorted(self.out.parent.glob(f"{self.out.stem}.*.txt"))]
        return "\n".join(text[-3000:] for text in texts)

    def close(self) -> None:
        for each in list(self.below()):
            with suppress(psutil.Error):
                each.kill()
        for parent in self.parents:
            parent.kill()
            parent.wait()


def lines_of(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def tried(
    trial: Trial,
    place: Path,
    config: Path,
    wanted: Path,
    limit: float,
    rng: random.Random,
    processes: int,
) -> Outcome:
    folder, found, began = place / "run", Outcome(), time.monotonic()
    words, known = [str(config), "--folder", str(folder)], set[int]()
    env = {"FLOWRL_HANG_SECONDS": str(limit), "FLOWRL_MEETING_SECONDS": str(3 * limit)}
    started = Started(trial.launcher, words, place / "out", env, processes)
    try:
        for hit in range(2):
            meeting = rng.random() < 0.5
            moment, due = rng.uniform(0, 12), min(1 + lines_of(folder) + 2 * hit, 6)
            first = None
            while time.monotonic() - began < FAILED and started.running():
                pid = started.process(trial.rank, known)
                first = time.monotonic() if pid and first is None else first
                ready = (
                    first is not None and time.monotonic() - first > moment
                    if meeting
                    else lines_of(folder) >= due
                )
                if pid is not None and ready:
                    number = signal.SIGKILL if trial.how == "kill" else signal.SIGSTOP
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                        known.add(pid)
                        found.hits += 1
                        break
                time.sleep(0.02)
        while started.running() and time.monotonic() - began < FAILED:
            time.sleep(0.1)
        codes = [parent.poll() for parent in started.parents]
        found.ended = codes == [0] * len(codes)
        found.wrong = "" if found.ended else f"codes {codes}\n{started.said()}"
    finally:
        started.close()
    found.seconds = round(time.monotonic() - began, 1)
    if found.ended:
        try:
            agree(folder, wanted)
            found.equal = True
        except (AssertionError, OSError, ValueError) as error:
            found.wrong = repr(error)[:2000]
    return found


def prepared(out: Path, processes: int) -> Path:
    """The run's file, beside its ends without any death: in one process, and in several."""
    out.mkdir(parents=True, exist_ok=True)
    config = out / "tiny.yaml"
    if not config.exists():
        tree = small(runs.write_pipeline(out / "pipeline"), out)
        tree["train"]["iterations"] = 8
        tree["prompts"]["per_iteration"] = processes
        runs.write(tree, out)
    for name in ("supervisor", "torchrun"):
        whole = out / f"unbroken-{name}"
        if not whole.exists():
            started = Started(name, [str(config), "--folder", str(whole)], whole, {}, processes)
            assert [p.wait(FAILED) for p in started.parents] == [0], started.said()
    return config


def trials(given: argparse.Namespace) -> Iterator[Trial]:
    """All launchers, ranks and ways in turn, without end."""
    for number in count():
        for how in given.how:
            for launcher in given.only:
                for rank in (0,) if launcher == "supervisor" else (given.processes - 1, 0):
                    if how == "kill" or launcher != "supervisor":  # which waits for its child
                        yield Trial(launcher, rank, how, number)


def table(rows: list[dict]) -> str:
    lines = ["| launcher | how | trials | hits | ended | equal to the bit |", "|" + "---|" * 6]
    for launcher in NAMES:
        for how in ("kill", "stop"):
            of = [r for r in rows if (r["launcher"], r["how"]) == (launcher, how)]
            sums = [sum(int(r[name]) for r in of) for name in ("hits", "ended", "equal")]
            if of:
                lines.append(f"| {launcher} | {how} | {len(of)} | {' | '.join(map(str, sums))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PROJECT / "runs" / "launchers")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds until a hang is ended")
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--how", nargs="*", choices=("kill", "stop"), default=("kill", "stop"))
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--processes", type=int, default=2, help="an even number; another --out")
    given = parser.parse_args()
    config = prepared(given.out, given.processes)
    end = time.monotonic() + 60 * given.minutes
    file = given.out / "trials.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {Trial(r["launcher"], r["rank"], r["how"], r["number"]) for r in rows}
    for trial in trials(given):
        if time.monotonic() > end:
            break
        if trial in done:
            continue
        name = f"{trial.launcher}-{trial.rank}-{trial.how}-{trial.number}"
        place = given.out / name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        wanted = given.out / (
            "unbroken-supervisor" if trial.launcher == "supervisor" else "unbroken-torchrun"
        )
        rng = random.Random(f"{given.seed} {name}")
        found = tried(trial, place, config, wanted, given.limit, rng, given.processes)
        rows.append(asdict(trial) | asdict(found))
        with file.open("a") as all_of_them:
            all_of_them.write(json.dumps(rows[-1]) + "\n")
        print(f"{name}: {found}", flush=True)
        if found.equal:
            shutil.rmtree(place)
    print(table(rows))
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
