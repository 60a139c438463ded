"""An iteration of a model of published size: seconds, peak memory, and what its network takes."""

import gc
import time
from typing import Any

import torch

from flowrl.estimate.memory import estimate
from flowrl.iteration.open import open_stages
from flowrl.models import savings
from flowrl.session.progress import Progress
from flowrl.session.session import Session
from scripts.benchmarks.network_alone import network_alone
from scripts.gpu.subjects import (
    Settings,
    Subject,
    UpdateFigures,
    first_update,
    opened,
    same_gradients,
)
from scripts.gpu.trial import GIB, Trial


def whole_iteration(trial: Trial, subject: Subject, repeats: int = 3) -> None:
    """Measure the network's calls alone, which also warm up, and then one iteration; write a trace
    of three calls."""
    began = time.perf_counter()
    with opened(subject, rehearse=trial.rehearse) as session:
        held = torch.cuda.memory_allocated() / GIB
        trial.measured("opened", seconds=time.perf_counter() - began, GiB=held)
        frozen, graded = alone(trial, session, repeats)
        with_cudnn(trial, session, repeats, (frozen, graded))
        torch.cuda.reset_peak_memory_stats()
        found = iteration(trial, session)
        peak = torch.cuda.max_memory_allocated() / GIB
        network = frozen * (found["sampling"] + found["frozen"]) + graded * found["training"]
        planned = estimate(session.run)
        trial.measured(
            "iteration", seconds=found["seconds"], sampling=found["seconds/sample"],
            update=found["seconds/update"], GiB=peak, network=network,
            over_network=found["seconds"] / network,
            planned_GiB=None if planned is None else planned.total / GIB,
        )  # fmt: skip
        rows = session.learner.policy.sizes.rows("sampling", 1)
        trial.trace(network_alone(session, rows)[0])
    forget()


def alone(
    trial: Trial, session: Session, repeats: int, what: str = "network"
) -> tuple[float, float]:
    """Seconds per row of all network calls of a velocity: without gradients, and with backward."""
    rows = session.learner.policy.sizes.rows("sampling", 1)
    frozen, graded = network_alone(session, rows)
    without = trial.timed(f"{what}, without gradients", frozen, repeats=repeats, warm=1, rows=rows)
    with_them = trial.timed(f"{what}, with gradients", graded, repeats=repeats, warm=1, rows=rows)
    return without / rows, with_them / rows


def with_cudnn(trial: Trial, session: Session, repeats: int, before: tuple[float, float]) -> None:
    """Measure the same calls with cuDNN's attention where no mask is given."""
    savings.cudnn_attention("unmasked")
    try:
        after = alone(trial, session, repeats, "network with cuDNN")
    finally:
        savings.cudnn_attention(session.run.model.cudnn_attention)
    names = ("without gradients", "with gradients")
    for name, one, other in zip(names, after, before, strict=True):
        trial.measured(f"cuDNN beside not, {name}", ratio=one / other)


def iteration(trial: Trial, session: Session) -> dict[str, float]:
    """Seconds and counts of one iteration, as metrics.jsonl has them."""
    stages = open_stages(session, Progress(optimizer_steps=1))  # the first is checked, and longer
    found = dict[str, Any]()
    found["seconds"] = trial.wall(lambda: found.update(stages.iterate(0).metrics))
    counts = {name: found[f"count/{name}"] for name in ("sampling", "training", "frozen")}
    return {**found, **counts}


def two_precisions(trial: Trial, subject: Subject, smaller: Settings) -> None:
    """Check the first update in bfloat16 beside float32, both of the same random weights, and in
    bfloat16 with cuDNN's attention."""
    found = dict[str, UpdateFigures]()
    change = {} if trial.rehearse else smaller
    for name, model in (
        ("bfloat16", {"dtype": "bfloat16"}),
        ("float32", {"dtype": "float32"}),
        ("cuDNN", {"dtype": "bfloat16", "cudnn_attention": "unmasked"}),
    ):
        with opened(subject, change, {"model": model}, rehearse=trial.rehearse) as opens:
            found[name] = first_update(opens)
        del opens
        forget()
    by_cudnn = found.pop("cuDNN")
    same_gradients(trial, "first update", found)
    same_gradients(trial, "first update with cuDNN", {**found, "bfloat16": by_cudnn})


def forget() -> None:
    """Give the memory of what is no longer named back to the device."""
    gc.collect()
    torch.cuda.empty_cache()
