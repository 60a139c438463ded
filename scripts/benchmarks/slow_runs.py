"""Train runs of two processes that are slow and healthy, under a short limit: none may be ended.

    python scripts/benchmarks/slow_runs.py --out runs/slow

The limit of a hang (FLOWRL_HANG_SECONDS, 1800 by default) is `--limit` seconds here, and everything
else is as much shorter: a reward of five minutes takes a sixth of it. One of the two processes is
slow, in one of the ways of the table below, while the other waits for it; several of them take
longer than the limit as a whole. One more way is a hang, which must be ended: else nothing is tried
here. Every run is appended to `runs.jsonl`; started again, the script goes on after the last one.
"""

import argparse
import http.server
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from flowrl.paths import PROJECT
from flowrl.processes.watch import ENDED_BY_WATCH, HANG_VARIABLE
from tests.support import runs
from tests.support.warm import Process, Warm, small

REWARD = """
import os, subprocess, threading, time, urllib.request
from concurrent.futures import ThreadPoolExecutor

LIMIT, WAY, SLOW, PORT = {limit}, {way!r}, {slow}, {port}
ROWS = 12
EACH = LIMIT / 8  # seconds of a row: all rows together take longer than the limit
calls = 0


def ask(_):
    urllib.request.urlopen(f"http://127.0.0.1:{{PORT}}/{{EACH}}").read()


def one_call(): time.sleep(LIMIT / 6)


def row_by_row():
    for _ in range(ROWS): time.sleep(EACH)


def server():
    for row in range(ROWS): ask(row)


def pool():
    with ThreadPoolExecutor(2) as threads: list(threads.map(ask, range(2 * ROWS)))


def thread():
    own = threading.Thread(target=row_by_row)
    own.start()
    own.join()


def processes():
    for _ in range(ROWS): subprocess.run(["sleep", str(EACH)])


def computes():
    end = time.monotonic() + 1.5 * LIMIT
    while time.monotonic() < end: pass


def compiles():
    import torch
    os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
    for power in range(3):
        torch.compile(lambda x: (x.sin() ** (power + 2)).softmax(-1) @ x.T)(torch.randn(64, 64))


def disk():
    whole = os.fsync

    def slowly(file):
        time.sleep(EACH)
        whole(file)

    os.fsync = slowly


def hangs(): threading.Event().wait()


if WAY == "opening" and os.environ["RANK"] == str(SLOW): row_by_row()


def slow(samples):
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == str(SLOW) and WAY in globals():
        globals()[WAY]()
    return samples.media.flatten(1).mean(1)
"""

WAYS = {
    "one_call": "a reward whose one call takes a sixth of the limit, as five minutes of 30",
    "row_by_row": "a reward that waits for each of its rows, longer than the limit in all",
    "server": "a reward that asks a slow server row by row",
    "pool": "the same in a pool of threads",
    "thread": "a reward that waits in a thread of its own",
    "processes": "a reward that waits for one process after the other",
    "computes": "a reward that computes for longer than the limit",
    "compiles": "a first compilation (torch.compile with its C++ compiler)",
    "disk": "a disk that takes an eighth of the limit for each file",
    "opening": "a process that opens the run for longer than the limit",
    "stopped": "a process that is stopped for a sixth of the limit again and again",
}
HANG = "hangs"


@dataclass(frozen=True)
class SlowRun:
    way: str
    rank: int  # of the slow process


@dataclass
class SlowEnd:
    codes: list[int | None]
    seconds: float
    right: bool = False
    said: str = ""


class _Late(http.server.BaseHTTPRequestHandler):
    """Answers after as many seconds as the path names."""

    def do_GET(self) -> None:
        time.sleep(float(self.path[1:]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def slow_server() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Late) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def tried(run: SlowRun, warm: Warm, place: Path, pipeline: Path, limit: float) -> SlowEnd:
    """One run, in a new folder."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    with slow_server() as port:
        own = place / "own.py"
        own.write_text(REWARD.format(limit=limit, way=run.way, slow=run.rank, port=port))
        tree = small(pipeline, place) | {"rewards": [{"name": f"{own}:slow"}]}
        began = time.monotonic()
        words = (runs.write(tree, place), "--folder", place / "run")
        started = Process(warm, words, place / "out.txt", 2, launched=False)
        try:
            end = began + 20 * limit + 60
            while started.running() and time.monotonic() < end:
                if run.way == "stopped":
                    _stop(started.pids[run.rank], limit / 6)
                time.sleep(0.2)
        finally:
            started.kill()
        codes = started.wait()
    said = "".join(path.read_text() for path in sorted(place.glob("out*.txt")))
    found = SlowEnd(codes, round(time.monotonic() - began, 1))
    if run.way == HANG:
        found.right = ENDED_BY_WATCH in codes and "made no progress" in said
    else:
        found.right = codes == [0, 0] and len(runs.lines(place / "run")) == 5
    found.said = "" if found.right else said[-3000:]
    return found


def _stop(pid: int, seconds: float) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.8)


def table(rows: list[dict]) -> str:
    lines = ["| way | runs | as it must be | seconds |", "|---|---|---|---|"]
    for way, meaning in {**WAYS, HANG: "a hang, which must be ended"}.items():
        of = [row for row in rows if row["way"] == way]
        if of:
            right, seconds = sum(row["right"] for row in of), [row["seconds"] for row in of]
            between = f"{min(seconds):.0f} to {max(seconds):.0f}"
            lines.append(f"| {meaning} | {len(of)} | {right} | {between} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=PROJECT / "runs" / "slow")
    parser.add_argument("--limit", type=float, default=24.0, help="seconds of a hang")
    parser.add_argument("--only", nargs="*", choices=(*WAYS, HANG), default=(*WAYS, HANG))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    pipeline = runs.write_pipeline(given.out / "pipeline")
    os.environ[HANG_VARIABLE] = str(given.limit)
    file = given.out / "runs.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(row["way"], row["rank"]) for row in rows}
    warm = Warm()
    for way in given.only:
        for rank in (1, 0):  # 0 also keeps the store in which the processes meet
            run = SlowRun(way, rank)
            if (way, rank) in done or (way == "disk" and rank == 1):  # the main process saves
                continue
            found = tried(run, warm, given.out / f"{way}-{rank}", pipeline, given.limit)
            rows.append(asdict(run) | asdict(found))
            with file.open("a") as kept:
                kept.write(json.dumps(rows[-1]) + "\n")
            print(f"{way}, process {rank}: {found}", flush=True)
    warm.close()
    print(table(rows))
    sys.exit(not all(row["right"] for row in rows))


if __name__ == "__main__":
    main()
