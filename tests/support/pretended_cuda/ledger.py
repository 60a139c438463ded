"""Counts of what a GPU waits for and copies, by phase and by the line of ours that asked for it."""

import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from flowrl.paths import PROJECT

HERE = str(Path(__file__).parent)
OWN = tuple(str(PROJECT / name) + "/" for name in ("flowrl", "samplers", "rewards"))
HELPERS = tuple(str(PROJECT / "samplers" / name) for name in ("host.py", "untyped.py"))
OF_TRANSFORMERS = ("models/", "masking_utils", "integrations/", "activations", "cache_utils")
NETWORKS = ("/diffusers/models/", "/peft/", *(f"/transformers/{each}" for each in OF_TRANSFORMERS))
OTHER = "other"


class DeviceMix(RuntimeError):
    """Tensors of two devices in one operation."""


@dataclass(frozen=True)
class Place:
    """A line of ours, and the phase that it ran in. `network`: a network's own operation."""

    phase: str
    line: str
    network: bool


@dataclass
class Ledger:
    """Counts while `on`. A place's phase is that of the innermost of `phases` among its frames;
    backward passes, which have frames in no thread, are in the phase of `backward`.

    counts  by kind: sync, upload (pageable memory: the host waits for it), pinned, download,
            kernel, float64, and the bytes of copies and of kernels (read and written)
    """

    phases: Mapping[CodeType, str] = field(default_factory=dict)
    backward: str = OTHER
    on: bool = False
    warns: bool = False  # of what waits, as torch.cuda.set_sync_debug_mode("warn") lets torch do
    counts: Counter[tuple[str, Place]] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)  # of trained networks, by phase
    mixes: list[str] = field(default_factory=list)
    live: int = 0  # bytes of the device
    peak: int = 0
    in_backward: int = 0

    def add(self, kind: str, number: int = 1) -> None:
        if self.warns and kind == "sync" and number:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        if self.on:
            self.counts[kind, self.place()] += number

    def copied(self, kind: str, size: int) -> None:
        if self.warns and kind == "upload":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        if self.on:
            place = self.place()
            self.counts[kind, place] += 1
            self.counts[f"{kind}_bytes", place] += size

    def kernel(self, size: int, double: bool) -> None:
        """Count an operation that reads and writes `size` bytes. `double`: in float64."""
        place = self.place()
        self.counts["kernel", place] += 1
        self.counts["kernel_bytes", place] += size
        if double:
            self.counts["float64", place] += 1

    def mix(self, sentence: str) -> DeviceMix:
        found = f"{sentence} at {self.place().line}"
        self.mixes.append(found)
        return DeviceMix(found)

    def hold(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def free(self, size: int) -> None:
        self.live -= size

    @contextmanager
    def counting(self):
        """Count from nothing, inside."""
        self.counts.clear()
        self.calls.clear()
        self.peak, self.on = self.live, True
        try:
            yield self
        finally:
            self.on = False

    def total(self, kind: str, phase: str | None = None, network: bool | None = None) -> int:
        return sum(
            number
            for (counted, place), number in self.counts.items()
            if counted == kind and phase in (None, place.phase) and network in (None, place.network)
        )

    def place(self) -> Place:
        own = library = phase = None
        frame = sys._getframe(1)
        while frame is not None and (own is None or phase is None):
            name = frame.f_code.co_filename
            if phase is None:
                phase = self.phases.get(frame.f_code)
            if own is None and not name.startswith(HERE) and "/torch/" not in name:
                if library is None:
                    library = f"{_short(name)}:{frame.f_lineno}", name
                if name.startswith(OWN) and name not in HELPERS:
                    own = f"{_short(name)}:{frame.f_lineno}"
            frame = frame.f_back
        if phase is None:
            phase = self.backward if self.in_backward else OTHER
        if library is None:
            return Place(phase, "backward" if self.in_backward else "?", self.in_backward > 0)
        network = any(part in library[1] for part in NETWORKS)
        if own is None or own == library[0]:
            return Place(phase, own or library[0], network)
        return Place(phase, f"{own} > {library[0]}", network)


def _short(name: str) -> str:
    return name.split("/site-packages/")[-1].removeprefix(f"{PROJECT}/")
