"""Run the stages on a machine with one GPU, so that whatever ends early costs only itself.

    python scripts/gpu/run.py --out OUT                       # call 1, then call 2 with --known
    python scripts/gpu/run.py --out OUT --call 2 --known .gpu/lines.jsonl
    python scripts/gpu/run.py --out OUT --stages flux         # again, after a fix
    python scripts/gpu/run.py --out OUT --rehearse            # tiny sizes, on a pretended device

Each stage is a process group with a limit of its own. Its lines are on the disk as soon as they are
measured (OUT/lines.jsonl; scripts/gpu/lines.py says what they hold), what it prints is in
OUT/log.txt. A stage that has ended is not begun again unless --stages names it; one that was cut
off with the visit is. No stage begins whose predicted seconds are more than what is left of
--seconds. Exit code 0: all stages of the call have ended well; 1: some have not; 2: the first
failed, so the machine is of no use.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from flowrl.errors import UserError  # noqa: E402
from scripts.gpu.lines import Line, Lines, read_lines, tree_state, versions  # noqa: E402
from scripts.gpu.stages import STAGES, Predicted, Stage, predictions  # noqa: E402

CALL_SECONDS = 560.0  # of a call that may take ten minutes
TAIL = 2000  # characters of a failed stage's output in its line
BUSY = 10.0  # times its limit a rehearsed stage may take: a machine without a GPU, and others on it
INJECTED = ("fail", "hang", "kill")


@dataclass(frozen=True)
class Visit:
    """The stages of one call, and where they write.

    known     files of lines of earlier calls
    seconds   of this call
    rehearse  tiny sizes, on a pretended device
    injected  a fault by stage, for rehearsals: fail, hang or kill, after its first line
    again     stages to run although they have ended
    patience  factor of the stages' limits
    """

    out: Path
    stages: Sequence[Stage]
    predicted: Mapping[str, Predicted]
    known: Sequence[Path] = ()
    seconds: float = CALL_SECONDS
    rehearse: bool = False
    injected: Mapping[str, str] = field(default_factory=dict[str, str])
    again: Collection[str] = ()
    patience: float = 1.0

    @cached_property
    def state(self) -> Line:
        """The commit, and what differs from it, as the visit began."""
        return tree_state()

    @property
    def lines(self) -> Lines:
        return Lines(self.out / "lines.jsonl", {**self.state, **versions()})

    def left(self) -> list[Stage]:
        """The stages that have not ended on this commit, and those that are asked for again."""
        ended = {
            (line["stage"], line["commit"], line["differs"])
            for line in read_lines([*self.known, self.lines.file])
            if line["kind"] == "ended"
        }
        own = (self.state["commit"], self.state["differs"])
        return [s for s in self.stages if s.name in self.again or (s.name, *own) not in ended]

    def run(self) -> int:
        """Run what is left, and return the exit code."""
        self.out.mkdir(parents=True, exist_ok=True)
        end, outcomes = time.monotonic() + self.seconds, list[str]()
        for stage in self.left():
            remaining, predicted = end - time.monotonic(), self.predicted[stage.name]
            if predicted["seconds"] > remaining:
                print(f"{stage.name}: left for another call, {remaining:.0f} s remain", flush=True)
                outcomes.append("left")
                continue
            outcomes.append(self.run_stage(stage, predicted, remaining))
            if stage.needed and outcomes[-1] != "done":
                return 2
        return int(any(outcome != "done" for outcome in outcomes))

    def run_stage(self, stage: Stage, predicted: Predicted, remaining: float) -> str:
        """Run a stage within its limit, and write how it ended. Returns the outcome."""
        limit = min(self.patience * stage.limit(predicted), remaining)
        lines = self.lines
        lines.add(stage.name, "predicted", stage.about, predicted=predicted, limit=limit)
        print(f"{stage.name}: {predicted['seconds']:.0f} s predicted", flush=True)
        log, began = self.out / "log.txt", time.monotonic()
        start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *self.words(stage)], cwd=PROJECT, env=self.environment(),
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            outcome = ended(process, limit)
        seconds = time.monotonic() - began
        with log.open("rb") as output:
            output.seek(start)
            tail = output.read().decode(errors="replace")[-TAIL:]
        why = {} if outcome == "done" else {"why": tail}
        lines.add(stage.name, "ended", stage.about, outcome=outcome, seconds=seconds,
                  predicted=predicted, **why)  # fmt: skip
        print(f"{stage.name}: {outcome} after {seconds:.0f} s", flush=True)
        return outcome

    def words(self, stage: Stage) -> Sequence[str]:
        if stage.words:
            return stage.words
        rehearsed = ["--rehearse"] if self.rehearse else []
        fault = self.injected.get(stage.name)
        rehearsed += [] if fault is None else ["--inject", fault]
        return ["-m", "scripts.gpu.trial", stage.name, "--out", str(self.out), *rehearsed]

    def environment(self) -> dict[str, str]:
        known = os.environ.get("PYTHONPATH", "")
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(self.out.absolute() / "compiled" / "cache")}
        return {
            **os.environ,
            **caches,
            "PYTHONPATH": os.pathsep.join([str(PROJECT), *([known] if known else [])]),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
        }


def ended(process: subprocess.Popen[bytes], limit: float) -> str:
    """Wait for a process that leads a group, and end the group at the limit. Returns the outcome:
    done, failed, killed (by a signal) or timeout."""
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return "timeout"
    else:
        return "done" if code == 0 else "killed" if code < 0 else "failed"
    finally:
        with suppress(ProcessLookupError):  # processes that it has started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def chosen(names: Sequence[str], call: int) -> list[Stage]:
    """The named stages, or those of a call. UserError for an unknown name."""
    known = {stage.name: stage for stage in STAGES}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--stages: {unknown[0]!r} is not known; choose from {', '.join(known)}")
    if names:
        return [known[name] for name in names]
    first = [stage for stage in STAGES if stage.needed]  # of each call: the machine is a new one
    return [*first, *(s for s in STAGES if s.call == call and s not in first)]


def faults(words: Sequence[str]) -> dict[str, str]:
    """STAGE=FAULT of rehearsals. UserError for another form."""
    pairs = [word.partition("=") for word in words]
    for name, _, fault in pairs:
        if name not in {stage.name for stage in STAGES} or fault not in INJECTED:
            raise UserError(f"--inject: {name}={fault}: give STAGE=fail, STAGE=hang or STAGE=kill")
    return {name: fault for name, _, fault in pairs}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--call", type=int, choices=(1, 2), default=1)
    parser.add_argument("--stages", nargs="*", default=[], metavar="STAGE")
    parser.add_argument("--known", type=Path, nargs="*", default=[], help="lines of earlier calls")
    parser.add_argument("--seconds", type=float, default=CALL_SECONDS)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--inject", nargs="*", default=[], metavar="STAGE=FAULT")
    given = parser.parse_args(words)
    try:
        stages = chosen(given.stages, given.call)
        again = {*given.stages} or {stage.name for stage in stages if stage.needed}
        visit = Visit(
            out=given.out, stages=stages, predicted=predictions(), known=given.known,
            seconds=given.seconds, rehearse=given.rehearse, injected=faults(given.inject),
            again=again, patience=BUSY if given.rehearse else 1.0,
        )  # fmt: skip
        return visit.run()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
