"""Count what an iteration makes a GPU wait for and copy, without one.

    python scripts/benchmarks/device_report.py RUN.yaml [...] [--json] [--SETTING VALUE ...]

The run is opened on a pretended CUDA device (tests/support/pretended_cuda) and does two iterations;
the second is counted. Settings are changed as in `flowrl train`. With --json a line for each run:

calls               of trained networks. Each object below has `sampling` (everything inside of a
                    batch's rollouts, but not decoding and rewards) and `training` (the update)
syncs_per_call      the host waits for the device: a value, a size or a copy is read
uploads_per_call    copies from pageable memory, for which the host waits
pinned_per_call     copies from pinned memory that do not block
downloads_per_call  copies to the host
kernels_per_call    operations outside of networks; those of an optimizer step (norm, clipping, the
                    optimizer) are `kernels_per_update`
kernel_bytes_per_call  bytes that these read and write
float64_per_call    operations in float64
updates             optimizer steps; `syncs_per_update` are those of training over them
whole_iteration     all of these counts, and the bytes of copies, with decoding, rewards and credit
live_bytes          the most that the device held in the counted iteration, and `planned_bytes`,
                    what `flowrl plan` says that it takes (null: unknown)
mixes               operations on tensors of two devices: the report ends at the first
by_line             the same counts by phase and line of ours (and of a library that it called)
"""

import argparse
import functools
import inspect
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.pretended_cuda import compiled
from tests.support.pretended_cuda.ledger import DeviceMix, Ledger

PHASES = {"sampling": ("sampling",), "training": ("training", "step")}
KINDS = {
    "syncs": "sync",
    "uploads": "upload",
    "pinned": "pinned",
    "downloads": "download",
    "kernels": "kernel",
    "kernel_bytes": "kernel_bytes",
    "float64": "float64",
}
OF_OPERATIONS = ("kernel", "kernel_bytes")  # a network's own are left out
BYTES = ("upload_bytes", "pinned_bytes", "download_bytes")


def phases() -> dict[Any, str]:
    """Phases by the functions whose frames they run in."""
    from flowrl.iteration.sample import decode_samples_of
    from flowrl.iteration.update import optimizer_step, update
    from flowrl.models.diffusers.batch import MediaBatch
    from flowrl.models.language.batch import TextBatch
    from rewards import score_all

    sampling = (MediaBatch.rollouts, TextBatch.rollouts)
    others = (decode_samples_of, score_all)
    named = [("sampling", each) for each in sampling] + [("other", each) for each in others]
    named += [("training", update), ("step", optimizer_step)]
    return {inspect.unwrap(function).__code__: phase for phase, function in named}


@contextmanager
def counted_calls(ledger: Ledger, kinds: set[type]) -> Iterator[None]:
    """Count the calls of networks of these classes, inside."""

    def counted(forward):
        @functools.wraps(forward)
        def call(*args, **kwargs):
            if ledger.on:
                ledger.calls[ledger.place().phase] += 1
            return forward(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(patch.object(kind, "forward", counted(kind.forward)))
        yield


def measured(ledger: Ledger, path: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Do two iterations of the run and count the second."""
    from flowrl.cli.floor import Opened
    from flowrl.estimate.memory import estimate
    from flowrl.models.shards import GatheredCalls
    from flowrl.session.session import open_accelerator, open_session
    from flowrl.settings.read import override, read_run

    quiet = ["--model.device", "cuda", "--train.alarms", "off", "--track.trackers", "[]"]
    run = override(read_run(path), [*quiet, *changes])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        session = open_session(run, folder, open_accelerator(run, folder))
        kept = Opened(session)
        roots = session.learner.policy.roots().values()
        inner = [r.repeated.base_model if isinstance(r, GatheredCalls) else r for r in roots]
        networks = {*map(type, inner)}
        try:
            kept.turn()
            with counted_calls(ledger, networks), ledger.counting():
                kept.turn()
            session.writer.wait()
        except DeviceMix:
            pass  # the ledger has it
        finally:
            session.learner.policy.close()
    updates, planned = run.train.optimizer_steps, estimate(run)
    return {"run": str(path), **report(ledger), "updates": updates} | {
        "planned_bytes": None if planned is None else planned.total,
        "syncs_per_update": total(ledger, "sync", "training") / updates,
        "kernels_per_update": ledger.total("kernel", "step", False) / updates,
    }


def total(ledger: Ledger, kind: str, phase: str) -> int:
    if kind in OF_OPERATIONS:
        return ledger.total(kind, phase, network=False)
    return sum(ledger.total(kind, each) for each in PHASES[phase])


def report(ledger: Ledger) -> dict[str, Any]:
    def per_call(kind: str, phase: str) -> float:
        return round(total(ledger, kind, phase) / max(1, ledger.calls[phase]), 3)

    return {
        "calls": {phase: ledger.calls[phase] for phase in PHASES},
        **{
            f"{name}_per_call": {phase: per_call(kind, phase) for phase in PHASES}
            for name, kind in KINDS.items()
        },
        "whole_iteration": {
            **{name: ledger.total(kind) for name, kind in KINDS.items()},
            **{name: ledger.total(name) for name in BYTES},
        },
        "live_bytes": ledger.peak,
        "mixes": len(ledger.mixes),
        "mixed": list(ledger.mixes),
        "by_line": by_line(ledger),
    }


def by_line(ledger: Ledger) -> list[dict[str, Any]]:
    """Counts of each line, those that wait most first; a network's own kernels are left out."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for (kind, place), number in ledger.counts.items():
        if not (place.network and kind in OF_OPERATIONS):
            found.setdefault((place.phase, place.line), Counter())[kind] += number
    order = sorted(found.items(), key=lambda item: [-item[1][k] for k in KINDS.values()])
    return [{"phase": phase, "line": line, **counts} for (phase, line), counts in order]


def table(found: dict[str, Any]) -> str:
    head = f"{found['run']}: calls {found['calls']}, mixes {found['mixes']} {found['mixed']}"
    rows = [head, f"{'':20}" + "".join(f"{phase:>12}" for phase in PHASES)]
    for name in KINDS:
        values = found[f"{name}_per_call"]
        rows.append(f"{name + ' per call':20}" + "".join(f"{values[p]:12.2f}" for p in PHASES))
    syncs, kernels = found["syncs_per_update"], found["kernels_per_update"]
    rows.append(f"per update: {syncs:.1f} syncs, {kernels:.0f} kernels")
    rows.append(f"whole iteration: {found['whole_iteration']}")
    rows.append("live bytes {live_bytes}, planned {planned_bytes}".format(**found))
    for line in found["by_line"]:
        counts = {k: v for k, v in line.items() if k not in ("phase", "line")}
        rows.append(f"  {line['phase']:9}{line['line']}  {counts}")
    return "\n".join(rows)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.yaml")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each run")
    given, changes = parser.parse_known_args(words)
    try:
        compiled.load()
    except compiled.NoCompiler as error:
        print(error, file=sys.stderr)
        return 2
    import torch

    from tests.support.pretended_cuda.runtime import install

    ledger = install()
    torch.set_num_threads(1)
    ledger.phases, ledger.backward = phases(), "training"
    mixes = 0
    for path in given.runs:
        ledger.mixes.clear()
        found = measured(ledger, path, changes)
        print(json.dumps(found) if given.json else table(found), flush=True)
        mixes += found["mixes"]
    return 1 if mixes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
