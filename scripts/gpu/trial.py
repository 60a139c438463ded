"""A stage as a process, which scripts/gpu/run.py starts.

    python -m scripts.gpu.trial STAGE --out OUT

With --rehearse the sizes are tiny and the device is pretended (tests/support/pretended_cuda), so
seconds and bytes mean nothing. Exit code 1: a check has failed, or the stage has raised.
"""

import argparse
import gzip
import importlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from scripts.gpu.lines import Line, Lines, spread, tree_state, versions  # noqa: E402
from scripts.gpu.stages import STAGES, Predicted, predictions  # noqa: E402

LARGEST = 16 * 2**20  # bytes of a file that comes back
TRACED = 3  # calls
GIB = 2**30


@dataclass
class Trial:
    """A stage's view of its run: the device, where lines go, and its predictions.

    inject  a fault after the first measured line, for rehearsals: fail, hang or kill
    failed  the checks that have failed
    """

    stage: str
    out: Path
    predicted: Predicted
    rehearse: bool = False
    inject: str = ""
    failed: list[str] = field(default_factory=list[str])
    began: float = field(default_factory=time.perf_counter)
    about: Line = field(default_factory=dict[str, Any])

    @property
    def lines(self) -> Lines:
        return Lines(self.out / "lines.jsonl", self.about)

    def measured(self, what: str, **figures: Any) -> Line:
        """Write figures, each beside its prediction: `WHAT FIGURE` in predicted.json."""
        named = {name: self.predicted.get(f"{what} {name}") for name in figures}
        predicted = {name: value for name, value in named.items() if value is not None}
        line = self.lines.add(self.stage, "measured", what, figures=figures, predicted=predicted)
        self._fault()
        return line

    def check(self, what: str, passed: bool, **figures: Any) -> bool:
        """Write a check; the stage fails at its end if one has failed."""
        self.lines.add(self.stage, "checked", what, passed=bool(passed), figures=figures)
        self.failed += [] if passed else [what]
        return passed

    def tried(self, what: str, attempt: Callable[[], Any]) -> bool:
        """Try something that a device may lack, and write whether it works, or why not."""
        try:
            found = attempt()
        except Exception as error:  # whatever a device answers is the finding
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.lines.add(self.stage, "tried", what, works=False, why=why)
            return False
        self.lines.add(self.stage, "tried", what, works=True, found=found)
        return True

    def seconds(self, call: Callable[[], Any], repeats: int = 5, warm: int = 2) -> list[float]:
        """Seconds of calls by CUDA's events, after some that warm up. All events are queued before
        the first is waited for, so the host's wait is not measured."""
        import torch

        for _ in range(warm):
            call()
        pairs = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)
        ]
        torch.cuda.synchronize()
        for first, last in pairs:
            first.record()
            call()
            last.record()
        torch.cuda.synchronize()
        return [first.elapsed_time(last) / 1000 for first, last in pairs]

    def timed(
        self, what: str, call: Callable[[], Any], *, repeats: int = 5, warm: int = 2, **more: Any
    ) -> float:
        """Measure a call's seconds, with their spread. Returns the median."""
        found = spread(self.seconds(call, repeats, warm))
        self.measured(what, seconds=found["median"], spread=found, **more)
        return found["median"]

    def wall(self, call: Callable[[], Any]) -> float:
        """Seconds of one call on the host's clock, the device's work included."""
        import torch

        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def trace(self, call: Callable[[], Any]) -> None:
        """Write a trace of three calls, if it is small enough to come back."""
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, *([] if self.rehearse else [ProfilerActivity.CUDA])]
        file = self.out / f"trace_{self.stage}.json.gz"
        with profile(activities=kinds) as seen:
            for _ in range(TRACED):
                call()
        seen.export_chrome_trace(str(file))
        size = file.stat().st_size
        if size > LARGEST:
            file.unlink()
        self.measured("trace", calls=TRACED, bytes=size, back=size <= LARGEST)

    def snapshot(self) -> None:
        """Write what the device's memory holds, after it has run out."""
        import torch

        file = self.out / "memory.pickle.gz"
        with gzip.open(file, "wb") as out:
            pickle.dump(torch.cuda.memory._snapshot(), out)
        if file.stat().st_size > LARGEST:
            file.unlink()

    def _fault(self) -> None:
        fault, self.inject = self.inject, ""
        if fault == "fail":
            raise RuntimeError("injected")
        if fault == "hang":
            time.sleep(3600)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def begin(stage: str, out: Path, rehearse: bool, inject: str = "") -> Trial:
    """Install the pretended device, if it is asked for, and find out what lines are about."""
    if rehearse:
        from tests.support.pretended_cuda import compiled

        compiled.load()  # before torch
    import torch

    if rehearse:
        from tests.support.pretended_cuda.runtime import install

        install()
        torch.set_num_threads(1)
    if not torch.cuda.is_available():
        raise SystemExit(f"{stage}: torch sees no CUDA device; --rehearse needs none")
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    card = {"card": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "cudnn": cudnn}
    about = {**tree_state(), **versions(), **card, "rehearsal": rehearse}
    return Trial(stage, out, predictions()[stage], rehearse, inject, about=about)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=[stage.name for stage in STAGES])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--inject", default="", choices=("", "fail", "hang", "kill"))
    given = parser.parse_args(words)
    trial = begin(given.stage, given.out, given.rehearse, given.inject)
    import torch

    try:
        importlib.import_module(f"scripts.gpu.stage_{given.stage}").measure(trial)
    except torch.OutOfMemoryError:
        trial.snapshot()
        raise
    print(f"failed: {', '.join(trial.failed)}" if trial.failed else "all checks have passed")
    return int(bool(trial.failed))


if __name__ == "__main__":
    sys.exit(main())
