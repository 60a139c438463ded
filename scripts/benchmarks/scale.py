"""Estimate an iteration on many GPUs: operations, bytes over the wire and seconds, without any GPU.

    python scripts/benchmarks/scale.py --page docs/results/speed.md

Seconds of arithmetic are those of `flowrl plan --devices`, bytes those of `traffic.py`.
The wire has NVLINK within a machine of eight, and NETWORK beyond.
"""

import argparse
from pathlib import Path

from experiment import write_between
from traffic import traffic

from flowrl.estimate import sizes
from flowrl.estimate.devices import parse_devices
from flowrl.estimate.time import at_work, estimate_time, iteration_work
from flowrl.estimate.workers import traffic as workers_traffic
from flowrl.settings import Run
from flowrl.settings.read import override, read_run

NVLINK = 450e9  # bytes/s of an H100 in one direction, NVIDIA's H100 white paper
NETWORK = 50e9  # bytes/s of a 400 Gbit/s port for each GPU
GPUS = (8, 64, 512)
RUNS = {
    "FLUX.1-dev, Flow-GRPO": ("configs/papers/flow_grpo_flux_pickscore.yaml", []),
    "the same, 512 draws": (
        "configs/papers/flow_grpo_flux_pickscore.yaml",
        ["--prompts.per-iteration", "512"],
    ),
    "Wan 2.1 14B": ("configs/models/wan21_14b.yaml", []),
    "Wan 2.1 14B, 512 draws": (
        "configs/models/wan21_14b.yaml",
        ["--prompts.per-iteration", "512"],
    ),
}
COLUMNS = ("run", "GPUs", "draws", "PFLOP an iteration", "arithmetic", "DDP sends", "on the wire",
           "FSDP2 sends", "on the wire")  # fmt: skip
WORKERS_COLUMNS = ("run", "GPUs", "sample + train", "in turn on all", "lag 0", "lag 1",
                   "weights", "to a node", "samples")  # fmt: skip
WORKERS_HEAD = f"| {' | '.join(WORKERS_COLUMNS)} |\n{'|---' * len(WORKERS_COLUMNS)}|"
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def short(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def volume(count: float) -> str:
    return f"{count / 1e12:.1f} TB" if count >= 1e12 else f"{count / 1e9:.1f} GB"


def row(name: str, run: Run, gpus: int) -> str:
    model = sizes.of(run.trained_model, run.algorithm().steps)
    devices = parse_devices(f"{gpus}xH100")
    time = estimate_time(run, devices, 0.4)
    assert model is not None and time is not None
    sent = traffic(run, model, gpus)
    assert sent is not None
    work, rate = iteration_work(run), NVLINK if gpus <= 8 else NETWORK
    count = time.count
    passes = (3 if run.model.lora is None else 2) + int(run.train.gradient_checkpointing)
    total = work.sampling * count.state + (work.training * passes + work.frozen) * count.trained
    total += work.samples * (count.decode or 0.0)
    return (
        f"| {name} | {gpus} | {run.prompts.per_iteration} | {total / 1e15:.0f} | "
        f"{short(time.total)} | {volume(sent.ddp)} | {short(sent.ddp / rate)} | "
        f"{volume(sent.fsdp2)} | {short(sent.fsdp2 / rate)} |"
    )


def split(run: Run, gpus: int) -> tuple[int, float, float]:
    """The number of GPUs that sample such that an iteration with a lag is shortest, and the seconds
    of sampling and of training then. Neither half has more at work than there are draws."""
    time = estimate_time(run, parse_devices("H100"), 0.4)
    assert time is not None
    train, draws = time.phases["training"], run.prompts.per_iteration
    sample = time.total - train

    def halves(sampling: int) -> tuple[float, float]:
        return (
            sample / at_work(draws, sampling, 1),
            train / at_work(draws, gpus - sampling, 1),
        )

    best = min(range(1, gpus), key=lambda n: (max(halves(n)), sum(halves(n))))
    return best, *halves(best)


def workers_row(name: str, run: Run, gpus: int) -> str:
    sampling, sample, train = split(run, gpus)
    in_turn = estimate_time(run, parse_devices(f"{gpus}xH100"), 0.4)
    sent = workers_traffic(run)
    assert in_turn is not None and sent is not None
    busy = sum(
        at_work(run.prompts.per_iteration, n, 1) * t
        for n, t in ((sampling, sample), (gpus - sampling, train))
    )
    lags = [busy / gpus / whole for whole in (sample + train, max(sample, train))]
    return (
        f"| {name} | {gpus} | {sampling} + {gpus - sampling} | {short(in_turn.total)} | "
        f"{short(sample + train)}, {lags[0]:.0%} | {short(max(sample, train))}, {lags[1]:.0%} | "
        f"{volume(sent.weights)} | {short(sent.weights / NETWORK)} | {volume(sent.samples)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="write the table into this page")
    page = parser.parse_args().page
    rows = [
        row(name, override(read_run(Path(file)), changes), gpus)
        for name, (file, changes) in RUNS.items()
        for gpus in GPUS
    ]
    table = "\n".join([HEAD, *rows])
    beside = [
        workers_row(name, override(read_run(Path(file)), changes), gpus)
        for name, (file, changes) in RUNS.items()
        for gpus in GPUS
    ]
    workers = "\n".join([WORKERS_HEAD, *beside])
    print(table, workers, sep="\n\n")
    if page is not None:
        write_between(page, "scale", table)
        write_between(page, "workers", workers)


if __name__ == "__main__":
    main()
