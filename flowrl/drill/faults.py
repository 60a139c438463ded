"""The faults of a drill. Each takes a fresh copy of the run through one fault and to its end, and
returns what was lost, how long nothing went on, and whether the end has the same bits."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flowrl.drill.proxy import Proxy
from flowrl.drill.same_end import differences, numbered_in, saved, trained_until, unfinished
from flowrl.drill.training import DrilledProgram, Overdue, Training, begun, runs
from flowrl.processes.watch import PATIENCE

FaultKind = Literal["kills", "ends", "hangs", "fills", "cuts", "records"]
EVERY = 2  # iterations between checkpoints of a copy, so that some are not saved yet
DEATHS = 2  # of a restarted copy
STOPPED_SECONDS = 20.0  # that a training of one process stays stopped
TELLING_SECONDS = PATIENCE + 30.0  # in which one that waits for a stopped one says so
ORPHAN_SECONDS = 60.0  # that a training may take to end after its supervisor
STOPPED_CODE = 3  # of a run that ends itself
LAUNCHERS_CODE = 1  # of torchrun, for any code of its processes but 0
TMPFS_MOST = 2**31  # bytes of the largest disk that is filled


@dataclass
class FaultOutcome:
    """The result of a fault.

    fault     what was done
    right     whether it is as the documentation promises
    lost      iterations that were trained before the fault and again after it
    without   seconds from the fault until an iteration beyond the last one was done
    equal     whether the end has the bits of the unbroken run; None: it has no end to compare
    notes     sentences on what was seen
    tried     False: it is impossible here, and the note says why
    """

    fault: str
    right: bool = True
    lost: int | None = None
    without: float | None = None
    equal: bool | None = None
    notes: list[str] = field(default_factory=list)
    tried: bool = True

    def wrong(self, note: str) -> None:
        self.right = False
        self.notes.append(note)


@dataclass
class Drill:
    """A run and how it is drilled.

    run       its folder, which is only read
    copies    the folder of the copies
    words     rights that the user's own folder has, as words of a command
    last      iteration at which every copy ends
    limit     seconds within which a training must go on or end
    make      makes a copy of the run in a folder, with the drill's settings
    proxies   between the run and its servers
    """

    program: DrilledProgram
    run: Path
    copies: Path
    words: list[str]
    last: int
    limit: float
    rng: random.Random
    make: Callable[[Path], None]
    proxies: list[Proxy] = field(default_factory=list)
    start: float = 0.0  # seconds from the start of a training to its first iteration
    iteration: float = 0.0  # seconds of an iteration

    @property
    def unbroken(self) -> Path:
        return self.copies / "unbroken"

    @property
    def output(self) -> Path:
        return self.copies / "output.txt"

    def copy(self, name: str) -> Path:
        folder = self.copies / name
        shutil.rmtree(folder, ignore_errors=True)
        self.make(folder)
        self.output.write_text("")
        return folder

    def resume(self, folder: Path) -> list[str]:
        return ["--resume", str(folder), *self.words]

    def train_unbroken(self) -> None:
        """Train the run that all others are compared with, and measure how long it lives.
        RuntimeError with what it says if it does not end well."""
        folder = self.copy("unbroken")
        first, began = trained_until(folder), time.monotonic()
        with begun(self.program, self.resume(folder), folder, self.output) as training:
            try:
                training.until(lambda: training.passed(first), self.limit)
                self.start = time.monotonic() - began
                training.until(lambda: trained_until(folder) >= self.last, self.limit)
                seconds = (time.monotonic() - began - self.start) / (self.last - first - 1)
                self.iteration = seconds
                code = training.wait(self.limit)
            except Overdue as error:
                raise RuntimeError(
                    f"the unbroken run: {error}: {training.text()[-600:]}"
                ) from error
            if code:
                raise RuntimeError(f"the unbroken run ended with {code}: {training.text()[-600:]}")

    def at_a_moment(self, training: Training, unsaved: bool = False) -> bool:
        """Wait for a moment at which something happens: somewhere in an iteration, with another one
        after it. `unsaved`: the last iteration is in no checkpoint. Whether the training runs then;
        Overdue if it does not get there."""
        first = saved(self.run)
        later = range(first + 1, self.last - 1)
        goal = self.rng.choice([one for one in later if one % EVERY or not unsaved])
        training.until(lambda: trained_until(training.folder) >= goal, self.limit)
        return _wait(training, self.rng.uniform(0, self.iteration))

    def finish(self, folder: Path, outcome: FaultOutcome, before: int, since: float) -> None:
        """Resume to the end, and compare it."""
        outcome.lost = max(0, before - saved(folder))
        with begun(self.program, self.resume(folder), folder, self.output) as training:
            self.follow(training, outcome, before, since)
        self.compare(folder, outcome)

    def follow(self, training: Training, outcome: FaultOutcome, before: int, since: float) -> None:
        """Wait until a training is beyond where it was, and for its end."""
        try:
            if before < self.last:
                training.until(lambda: trained_until(training.folder) > before, self.limit)
                outcome.without = time.monotonic() - since
            code = training.wait(self.limit)
            if outcome.without is None:  # all iterations had been trained; they were to be saved
                outcome.without = time.monotonic() - since
            if code:
                outcome.wrong(f"it ended with code {code}: {_last(training.text())}")
        except Overdue as error:
            outcome.wrong(f"it never came back: {error}; {_last(training.text())}")

    def compare(self, folder: Path, outcome: FaultOutcome) -> None:
        if not outcome.right:
            return
        unequal = differences(folder, self.unbroken)
        outcome.equal = not unequal
        if unequal:
            outcome.wrong("; ".join(unequal[:3]))


def kill(drill: Drill, saving: bool) -> FaultOutcome:
    """SIGKILL at a random moment, or while a folder is being written."""
    when = "while a checkpoint was written" if saving else "at a random moment"
    outcome = FaultOutcome(f"killed (SIGKILL) {when}")
    folder = drill.copy("killed")
    old = set(unfinished(folder))
    with begun(drill.program, drill.resume(folder), folder, drill.output) as training:
        running = drill.at_a_moment(training)
        if saving:
            with suppress(Overdue):
                running = training.until(lambda: bool(set(unfinished(folder)) - old), drill.limit)
        before, since = trained_until(folder), time.monotonic()
        if running:
            training.end()
    drill.finish(folder, outcome, before, since)
    return outcome


def kill_twice(drill: Drill) -> FaultOutcome:
    """Two deaths of a training, or of one process of several, that something restarts. It may
    restart as often as that: an attempt that fails by itself leaves too few."""
    several = drill.program.processes > 1
    by = f"torchrun --max-restarts {DEATHS}" if several else f"--restarts {DEATHS}"
    subject = "one process" if several else "the training"
    outcome = FaultOutcome(f"{subject} killed twice under {by}")
    folder = drill.copy("restarted")
    begin = [*drill.resume(folder)]
    with begun(drill.program, begin, folder, drill.output, DEATHS) as training:
        since, before = time.monotonic(), 0
        for time_of_death in range(1, DEATHS + 1):
            goal = min(saved(drill.run) + time_of_death, drill.last - 1)
            try:
                training.until(lambda goal=goal: trained_until(folder) >= goal, drill.limit)
            except Overdue as error:
                outcome.wrong(f"death {time_of_death - 1} of {DEATHS}: it never came back: {error}")
                return outcome
            workers = training.workers()
            before, since = trained_until(folder), time.monotonic()
            if not training.running() or not workers:
                outcome.wrong(f"it ended before death {time_of_death}: {_last(training.text())}")
                return outcome
            training.signal(signal.SIGKILL, drill.rng.choice(workers))
            outcome.lost = (outcome.lost or 0) + max(0, before - saved(folder))
            if before > saved(folder):  # a resume first cuts the lines off that it trains again
                with suppress(Overdue):
                    training.until(
                        lambda before=before: trained_until(folder) < before, drill.limit
                    )
        drill.follow(training, outcome, before, since)
    drill.compare(folder, outcome)
    return outcome


def ask_to_end(drill: Drill, number: signal.Signals) -> FaultOutcome:
    """A signal that asks for an end: the iteration is finished and saved."""
    outcome = FaultOutcome(f"asked to end ({number.name})")
    folder = drill.copy("asked")
    with begun(drill.program, drill.resume(folder), folder, drill.output) as training:
        drill.at_a_moment(training, unsaved=True)
        before, since = trained_until(folder), time.monotonic()
        training.signal(number)
        try:
            code = training.wait(drill.limit)
        except Overdue as error:
            outcome.wrong(f"it goes on: {error}")
            return outcome
        outcome.notes.append(f"exit code {code}")
        if saved(folder) < trained_until(folder):
            outcome.wrong(f"{number.name} lost what it had trained since its checkpoint")
            outcome.lost = trained_until(folder) - saved(folder)
            return outcome
    drill.finish(folder, outcome, max(before, trained_until(folder)), since)
    return outcome


def orphan(drill: Drill) -> FaultOutcome:
    """The death of the supervisor of `--restarts`: its child must not train on alone."""
    outcome = FaultOutcome("the supervisor of --restarts killed (SIGKILL)")
    folder = drill.copy("orphan")
    with begun(drill.program, drill.resume(folder), folder, drill.output, restarts=3) as training:
        drill.at_a_moment(training)
        workers = [p for p in training.workers() if p.pid != training.process.pid]
        before, since = trained_until(folder), time.monotonic()
        training.signal(signal.SIGKILL)
        training.process.wait()
        end = time.monotonic() + ORPHAN_SECONDS
        while (alive := [p for p in workers if runs(p)]) and time.monotonic() < end:
            time.sleep(0.1)
        took = time.monotonic() - since
        for process in alive:
            training.signal(signal.SIGKILL, process)
        if alive or trained_until(folder) >= drill.last:
            outcome.wrong(f"the training went on alone for {took:.0f} s")
            return outcome
        outcome.notes.append(f"the training ended {took:.1f} s after it")
    drill.finish(folder, outcome, max(before, trained_until(folder)), since)
    return outcome


def hang(drill: Drill) -> FaultOutcome:
    """A process that is stopped for a while, one of several if there are."""
    several = drill.program.processes > 1
    fault = f"the training stopped for {STOPPED_SECONDS:.0f} s (SIGSTOP), then continued"
    if several:
        fault = "one process stopped (SIGSTOP) until another one says so, then continued"
    outcome = FaultOutcome(fault)
    # others wait for it from their next exchange on, which is in the same iteration
    most = 2 * drill.iteration + TELLING_SECONDS if several else STOPPED_SECONDS
    folder = drill.copy("hung")
    with begun(drill.program, drill.resume(folder), folder, drill.output) as training:
        drill.at_a_moment(training)
        workers, length = training.workers(), len(training.text())
        before, since = trained_until(folder), time.monotonic()
        if not workers:
            outcome.wrong(f"it had ended: {_last(training.text())}")
            return outcome
        stopped = drill.rng.choice(workers)
        training.signal(signal.SIGSTOP, stopped)
        said = None
        try:
            while time.monotonic() < since + most and training.running() and said is None:
                time.sleep(0.1)
                said = _waits_for(stopped.pid, training.text()[length:]) if several else None
        finally:
            training.signal(signal.SIGCONT, stopped)
        if several and said is not None:
            outcome.notes.append(f"another one said after {time.monotonic() - since:.0f} s: {said}")
        elif several:
            outcome.wrong(f"the others waited for {most:.0f} s without a word about it")
        drill.follow(training, outcome, before, since)
    drill.compare(folder, outcome)
    outcome.lost = 0
    return outcome


def _waits_for(pid: int, said: str) -> str | None:
    """The sentence of a process that waits for this one, which names it."""
    lines = [line for line in said.splitlines() if "waited" in line and str(pid) in line]
    return lines[0].rstrip()[:200] if lines else None


# A disk of our own, in a namespace of mounts of its own, so that nothing else sees or fills it.
DISK_SCRIPT = """
import ctypes, os, shutil, subprocess, sys
source, place, size, code_file, *command = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
uid, gid = os.getuid(), os.getgid()
if libc.unshare(0x20000 | (0 if uid == 0 else 0x10000000)):
    sys.exit(99)
if uid:
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file: file.write(text)
libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None)
if libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, f"size={size},mode=700".encode()):
    sys.exit(99)
shutil.copytree(source, place, dirs_exist_ok=True)
code = subprocess.run(command).returncode
shutil.copytree(place, source, dirs_exist_ok=True)
for old in set(os.listdir(source + "/checkpoints")) - set(os.listdir(place + "/checkpoints")):
    shutil.rmtree(f"{source}/checkpoints/{old}")
with open(code_file, "w") as file: file.write(str(code))
"""


def fill_disk(drill: Drill) -> FaultOutcome:
    """A disk that is full before the next checkpoint is written: a tmpfs, seen by the run alone."""
    outcome = FaultOutcome("a full disk at a checkpoint")
    folder, place = drill.copy("filled"), drill.copies / "disk"
    size = _size(folder) + _size(numbered_in(folder / "checkpoints")[-1]) // 2 + 2**16
    if sys.platform != "linux" or size > TMPFS_MOST:
        note = "only Linux has namespaces of mounts"
        outcome.notes.append(note if sys.platform != "linux" else f"the copy has {size:,} bytes")
        outcome.tried = False
        return outcome
    place.mkdir(exist_ok=True)
    code_file = drill.copies / "code"
    code_file.unlink(missing_ok=True)
    words = drill.program.command(drill.resume(place))
    before_copy = trained_until(folder)
    with open(drill.output, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", DISK_SCRIPT, folder, place, str(size), code_file, *words],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=drill.program.environment(), start_new_session=True,
        )  # fmt: skip
    training = Training(process, folder, drill.output)
    since = time.monotonic()
    try:
        ended = training.wait(drill.limit)
    except Overdue as error:
        outcome.wrong(f"it did not end on a full disk: {error}")
        return outcome
    finally:
        training.end()
    if ended == 99:
        outcome.notes.append("this system permits no mounts in namespaces")
        outcome.tried = False
        return outcome
    code = int(code_file.read_text()) if code_file.exists() else ended
    last = _last(training.text())
    outcome.notes.append(f"exit code {code}: {last}")
    several = drill.program.processes > 1
    if code != (LAUNCHERS_CODE if several else STOPPED_CODE) or not last.startswith("flowrl: "):
        by = f", and torchrun then with {LAUNCHERS_CODE}" if several else ""
        outcome.wrong(
            f"a full disk must end a run with exit code {STOPPED_CODE} and a sentence{by}"
        )
        return outcome
    drill.finish(folder, outcome, max(before_copy, trained_until(folder)), since)
    return outcome


def cut_network(drill: Drill) -> FaultOutcome:
    """The connections to the run's servers cut for a while, through the drill's own proxies."""
    outcome = FaultOutcome("the network to its servers cut for 10 s")
    if not drill.proxies:
        outcome.tried = False
        outcome.notes.append("this run has no server with an http address")
        return outcome
    folder = drill.copy("cut")
    with begun(drill.program, drill.resume(folder), folder, drill.output) as training:
        drill.at_a_moment(training)
        before, since = trained_until(folder), time.monotonic()
        for proxy in drill.proxies:
            proxy.cut.set()
        try:
            _wait(training, 10)
        finally:
            for proxy in drill.proxies:
                proxy.cut.clear()
        if training.running():
            outcome.notes.append("it waited for its servers")
            drill.follow(training, outcome, before, since)
            outcome.lost = 0
            drill.compare(folder, outcome)
            return outcome
        outcome.notes.append(f"it ended with {training.wait(1)}: {_last(training.text())}")
    drill.finish(folder, outcome, max(before, trained_until(folder)), since)
    return outcome


def cut_record(drill: Drill) -> FaultOutcome:
    """The line of an iteration that the checkpoint has done is missing: a resume must report or
    refuse it. The base model's line (iteration 0) and lines after the checkpoint are promised by
    nobody: a run may have no evaluation before its first iteration, and trains later ones again."""
    outcome = FaultOutcome("a line of metrics.jsonl removed before a resume")
    folder = drill.copy("record")
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    promised = [at for at, line in enumerate(lines) if 1 <= _iteration(line) <= saved(folder)]
    if not promised:
        outcome.tried = False
        outcome.notes.append("this run has no line of an iteration that its checkpoint has done")
        return outcome
    del lines[promised[-2:][0]]  # the last but one: a line in the middle is missed less easily
    file.write_text("".join(lines))
    with begun(drill.program, drill.resume(folder), folder, drill.output) as training:
        try:
            code = training.wait(drill.limit)
        except Overdue as error:
            outcome.wrong(str(error))
            return outcome
        named = [line for line in training.text().splitlines() if "metrics.jsonl" in line]
    if named:
        outcome.notes.append(f"exit code {code}: {named[0][:300]}")
    else:
        outcome.wrong("it was taken in silence")
    return outcome


def _iteration(line: str) -> int:
    """The iteration of a line of metrics.jsonl; 0 if it is damaged."""
    try:
        return int(json.loads(line).get("iteration", 0))
    except ValueError:
        return 0


def finite_records(drill: Drill) -> FaultOutcome:
    """Whether metrics.jsonl is JSON, which has no NaN and no Infinity."""
    outcome = FaultOutcome("metrics.jsonl read as strict JSON")
    bad = []
    for line in (drill.unbroken / "metrics.jsonl").read_text().splitlines():

        def refuse(word: str) -> float:
            raise ValueError(word)

        try:
            json.loads(line, parse_constant=refuse)
        except ValueError as error:
            bad.append(str(error))
    if bad:
        outcome.wrong(f"{len(bad)} lines are no JSON: {', '.join(sorted(set(bad)))}")
    return outcome


def faults_of(
    kinds: Sequence[FaultKind], program: DrilledProgram
) -> list[tuple[str, Callable[[Drill], FaultOutcome]]]:
    """The faults of these kinds, in the order in which they are tried, with what each will do."""
    by_kind: dict[FaultKind, list[tuple[str, Callable[[Drill], FaultOutcome]]]] = {
        "kills": [
            ("kill a copy at a random moment", lambda d: kill(d, saving=False)),
            ("kill a copy while it writes a checkpoint", lambda d: kill(d, saving=True)),
            ("kill a restarted copy twice", kill_twice),
        ],
        "ends": [
            ("ask a copy to end (SIGTERM)", lambda d: ask_to_end(d, signal.SIGTERM)),
            ("ask a copy to end (SIGHUP: a terminal)", lambda d: ask_to_end(d, signal.SIGHUP)),
        ],
        "hangs": [("stop a copy for a while (SIGSTOP)", hang)],
        "fills": [("fill a small tmpfs in which a copy trains", fill_disk)],
        "cuts": [("cut the connections of a copy to its servers, in its own proxy", cut_network)],
        "records": [
            ("remove a line of a copy's metrics.jsonl", cut_record),
            ("read the metrics of a copy as strict JSON", finite_records),
        ],
    }  # fmt: skip
    if program.processes == 1:
        by_kind["ends"].append(("kill the supervisor of a restarted copy", orphan))
    return [fault for kind in kinds for fault in by_kind[kind]]


def _wait(training: Training, seconds: float) -> bool:
    """Wait, or until the training ends. Whether it runs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and training.running():
        time.sleep(0.02)
    return training.running()


def _size(folder: Path) -> int:
    return sum(os.stat(path).st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _last(text: str) -> str:
    """The last sentence of flowrl's own that a training wrote, else its last line with a word in
    it: a launcher writes a frame of its own below the sentence."""
    lines = [line for line in text.splitlines() if any(map(str.isalpha, line))]
    sentences = [line for line in lines if line.startswith("flowrl: ")]
    return (sentences or lines or ["it wrote nothing"])[-1][:300]
