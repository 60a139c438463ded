"""Predict what the stages measure, before a machine is lent: scripts/gpu/predicted.json.

    python scripts/gpu/predict.py            # two minutes; commit what it writes
    python scripts/gpu/predict.py --check    # exit code 1 if the file is another

Seconds and bytes of runs are those of `flowrl plan` on one H200, at 40 % of its peak, without the
encoders, which a stage replaces by small ones. Rates of the device are what such a card has shown.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from flowrl.estimate.devices import parse_devices  # noqa: E402
from flowrl.estimate.memory import estimate  # noqa: E402
from flowrl.estimate.time import estimate_time, iteration_work  # noqa: E402
from flowrl.models.description import describe  # noqa: E402
from flowrl.settings import RunSettings  # noqa: E402
from scripts.gpu import stage_beside, stage_flux, stage_savings, stage_wan  # noqa: E402
from scripts.gpu.peers import SOURCES  # noqa: E402
from scripts.gpu.stage_attention import BACKENDS, GRID_SECONDS, SIZES  # noqa: E402
from scripts.gpu.stages import PREDICTED, Predicted  # noqa: E402
from scripts.gpu.subjects import FLUX, SD35, WAN, Settings, Subject, settings  # noqa: E402
from scripts.gpu.trial import GIB, TRACED  # noqa: E402

DEVICE, UTILISATION = "1xH200", 0.4
IMPORTS, CONTEXT = 18.0, 3.0  # seconds of a process: of Python, and of CUDA
MADE = 8.0  # seconds in which a model of published size is made on the device
TINY = 5.0  # of the first updates of a tiny model
COLD = 80.0  # of compiling a block without and with gradients
RATES = {"copy rate": 4.3e12, "product in bfloat16 rate": 780e12, "product in float32 rate": 50e12}
LAUNCH = 8e-6
SIDE = 512  # pixels of the images that are sampled beside the peers
KERNELS = {  # shares of the peak, forward and with gradients, as an H200 has shown them
    "cuDNN": (0.64, 0.53),
    "flash": (0.345, 0.3),
    "efficient": (0.175, 0.14),
    "plain": (0.025, 0.036),
}
CLOSE = 0.01  # relative difference of a check: figures are rounded


def run_of(subject: Subject, *changes: Settings) -> RunSettings:
    with TemporaryDirectory() as folder:
        return settings(subject, Path(folder), *changes)


def seconds_of(run: RunSettings) -> float:
    """An iteration's seconds, by `flowrl plan`."""
    found = estimate_time(run, parse_devices(DEVICE), UTILISATION)
    assert found is not None, "the operations of each subject are counted"
    return found.total


def calls_of(run: RunSettings) -> tuple[float, float]:
    """Seconds per row of a velocity without gradients, and of one with its backward pass."""
    devices = parse_devices(DEVICE)
    found = estimate_time(run, devices, UTILISATION)
    assert found is not None
    speed = devices.peak(run.model.dtype) * UTILISATION
    passes = (3 if run.model.lora is None else 2) + int(run.train.gradient_checkpointing)
    return found.count.state / speed, passes * found.count.trained / speed


def peak_of(run: RunSettings) -> float:
    """The most GiB that an iteration holds, without the encoders, which a stage replaces by small
    ones."""
    planned = estimate(run)
    assert planned is not None, "the sizes of each subject are known"
    left_out = planned.parts.get("frozen parts", 0)
    phases = [b for name, b in planned.phases.items() if name != "encoding"]
    most = max(n + planned.media * (name == "decoding") for name, n in planned.phases.items()
               if name != "encoding")  # fmt: skip
    assert phases
    return (sum(planned.parts.values()) - left_out + most) / GIB


def two_precisions(subject: Subject, smaller: Settings) -> float:
    """Seconds of the first updates in both precisions: sampled, evaluated again, updated."""
    each = [
        seconds_of(run_of(subject, smaller, {"model": {"dtype": dtype}})) + MADE
        for dtype in ("bfloat16", "float32")
    ]
    return 1.3 * (sum(each) + each[0])  # once more with cuDNN's attention


def full_size(subject: Subject, smaller: Settings, repeats: int) -> Predicted:
    run = run_of(subject)
    without, with_them = calls_of(run)
    rows = run.train.call_sizes["sampling"]
    assert rows != "auto", "the rows per call of a subject are given"
    one, graded, whole = rows * without, rows * with_them, seconds_of(run)
    # one of each warms up; twice, without cuDNN's attention and with it
    calls = 2 * ((1 + repeats) * one + (1 + repeats) * graded) + TRACED * one
    return {
        "seconds": IMPORTS + CONTEXT + MADE + calls + whole + two_precisions(subject, smaller),
        "network, without gradients seconds": one,
        "network, with gradients seconds": graded,
        "iteration seconds": whole,
        "iteration GiB": peak_of(run),
    }


def attention() -> Predicted:
    """Four products forward and ten backward per pair and width, at a share of the peak."""
    peak, found = parse_devices(DEVICE).peak("bfloat16"), Predicted()
    for name, (rows, heads, length, width) in SIZES.items():
        pairs = rows * heads * length**2 * width
        for backend, (forward, graded) in KERNELS.items():
            found[f"{name}, {backend}, forward seconds"] = 4 * pairs / (forward * peak)
            found[f"{name}, {backend}, with gradients seconds"] = 14 * pairs / (graded * peak)
    assert {*KERNELS} == {*BACKENDS}
    return {"seconds": IMPORTS + CONTEXT + TINY + 2 * GRID_SECONDS, **found}


def beside() -> Predicted:
    run = run_of(SD35, stage_beside.EQUAL)
    whole = seconds_of(run)
    peers = {name: beside_whole(run, name, whole) for name in SOURCES}
    # a first iteration, a recorded one, one for the peak, and those beside the peers
    iterations = 3 + 2 * stage_beside.TURNS + stage_beside.PEER_TURNS
    turns = (1 + stage_beside.PEER_TURNS) * sum(peers.values())
    return {
        "seconds": 2 * (IMPORTS + CONTEXT + MADE) + iterations * whole + turns
        + two_precisions(SD35, stage_beside.SMALLER),
        "iteration seconds": whole,
        "iteration GiB": peak_of(run),
        "plain loop ratio": 1.05,
        **{f"{name} seconds": seconds for name, seconds in peers.items()},
        **{f"{name} ratio": whole / seconds for name, seconds in peers.items()},
    }  # fmt: skip


def beside_whole(run: RunSettings, peer: str, whole: float) -> float:
    """A peer's iteration. flow_grpo casts weights that it holds in float32 in every call, which
    reads and writes six bytes each; Flow-Factory lets T5 encode 256 tokens where the others encode
    128, beside those of CLIP and of the image."""
    if peer == "flow_factory":
        image, clip = (SIDE // 16) ** 2, 77
        return whole * (image + clip + 256) / (image + clip + 128)
    known = describe(run.model)
    assert known is not None
    layers = [m for m in known.component("transformer").modules() if isinstance(m, nn.Linear)]
    work, rows = iteration_work(run), run.train.call_sizes["sampling"]
    assert isinstance(rows, int)
    calls = (work.sampling + work.training + work.frozen) / rows
    weights = sum(layer.weight.numel() for layer in layers)
    return whole + calls * 6 * weights / RATES["copy rate"]


def savings() -> Predicted:
    without, with_them = calls_of(run_of(SD35))
    most = stage_savings.MOST_ROWS
    rows = 3.5 * most  # half, once, twice
    found = {f"{n} rows per call of sampling seconds": n * without
             for n in (most // 2, most, 2 * most)}  # fmt: skip
    found |= {f"{n} rows per call of training seconds": n * with_them
              for n in (most // 2, most, 2 * most)}  # fmt: skip
    calls = 4 * rows * (without + with_them) + 60 * without
    return {"seconds": IMPORTS + CONTEXT + MADE + 10 + calls, "merged beside not ratio": 0.85,
            **found}  # fmt: skip


def compiling() -> Predicted:
    without, with_them = calls_of(run_of(SD35))
    calls = 4 * 7 * 2 * (without + with_them)
    return {"seconds": IMPORTS + CONTEXT + MADE + calls + COLD,
            "plain, without gradients seconds": 4 * without,
            "plain, with gradients seconds": 4 * with_them,
            "compiled beside plain, without gradients ratio": 0.85,
            "compiled beside plain, with gradients ratio": 0.85}  # fmt: skip


def predicted() -> dict[str, Predicted]:
    """The figures of all stages, rounded to three digits."""
    start = {"seconds": IMPORTS + CONTEXT + 2 * TINY + 10, "imports seconds": IMPORTS,
             "launch seconds": LAUNCH, **RATES}  # fmt: skip
    found = {
        "start": start,
        "attention": attention(),
        "beside": beside(),
        "flux": full_size(FLUX, stage_flux.SMALLER, 3),
        "wan": full_size(WAN, stage_wan.SMALLER, 1),
        "savings": savings(),
        "compile": compiling(),
    }
    return {stage: {name: float(f"{value:.3g}") for name, value in figures.items()}
            for stage, figures in found.items()}  # fmt: skip


def differences(one: Mapping[str, Predicted], other: Mapping[str, Predicted]) -> list[str]:
    """The figures in which two predictions differ, by more than their rounding."""
    names = {(stage, name) for each in (one, other) for stage in each for name in each[stage]}
    return [
        f"{stage}: {name}"
        for stage, name in sorted(names)
        if not math.isclose(
            one.get(stage, {}).get(name, math.nan),
            other.get(stage, {}).get(name, math.nan),
            rel_tol=CLOSE,
        )
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(words)
    found = predicted()
    if given.check:
        differs = differences(found, json.loads(PREDICTED.read_text()))
        print("\n".join(differs) or "as predicted")
        return int(bool(differs))
    PREDICTED.write_text(json.dumps(found, indent=1) + "\n")
    for stage, figures in found.items():
        print(f"{stage}: {figures['seconds']:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
