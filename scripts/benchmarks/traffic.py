"""Estimate the bytes that an iteration sends over the wire, for DDP and for FSDP2.

Per process, with N processes, of which each sends and receives (N - 1) / N of a whole tensor:

    DDP     2 gradients per optimizer step (a ring's all-reduce)
    FSDP2   the blocks' weights per call without gradients, and twice per call with them (once if
            they stay gathered); the blocks' gradients per call with gradients; 2 times the other
            gradients per optimizer step

Left out: scores and metrics, which are small, evaluations, checkpoints, and context parallelism.
`tests/processes/test_traffic.py` compares with the bytes of two processes on a CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.estimate.memory import BYTES, rows_per_call
from flowrl.estimate.sizes import Sizes
from flowrl.estimate.time import iteration_work
from flowrl.likelihoods.matching import Matching
from flowrl.models.description import describe
from flowrl.processes.sharding import blocks
from flowrl.settings import LanguageSettings, RunSettings
from samplers import Plan


@dataclass(frozen=True)
class CallCounts:
    """Calls of the network by the process with most draws: without gradients, and with them."""

    plain: int
    graded: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that each process sends in an iteration (and receives as many)."""

    ddp: float
    fsdp2: float
    calls: CallCounts


def call_counts(
    run: RunSettings, processes: int, rows: int, graded_rows: int, iteration: int = 0
) -> CallCounts:
    """Count the calls of an iteration, for a run of images or videos: `rows` states each in
    sampling, and `graded_rows` in training."""
    algorithm, updates = run.algorithm(), run.train.updates
    levels = run.levels(algorithm.steps)
    made = algorithm.plan(levels, iteration, run.train.seed)
    plans = [plan for plan in made if isinstance(plan, Plan)]
    draws = -(-run.prompts.per_iteration // processes)
    drawn = -(-run.drawn // processes)
    plain = sum(-(-drawn * states // rows) for states in _sampled(plans))
    graded = sum(_dealt(draws * inputs, updates, graded_rows) for inputs in _trained(run, plans))
    work = iteration_work(run, iteration)
    frozen = graded * work.frozen / work.training if work.training else 0.0
    return CallCounts(plain + round(frozen), graded)


def _sampled(plans: Sequence[Plan]) -> list[int]:
    """States of a draw that each call of sampling evaluates."""
    return [states for plan in plans for states in plan.states[: len(plan.steps)]]


def _trained(run: RunSettings, plans: Sequence[Plan]) -> list[int]:
    """Inputs of a draw in each part of the training rows."""
    likelihood = run.algorithm().likelihood
    if isinstance(likelihood, Matching):
        kept = [2 if likelihood.paired else plan.group for plan in plans]
        return [n for n in kept for _ in range(likelihood.draws)]
    return [
        states
        for plan in plans
        for states, step in zip(plan.states, plan.steps, strict=False)
        if step.train
    ]


def _dealt(inputs: int, updates: int, rows: int) -> int:
    """Calls for inputs that are dealt into optimizer steps as evenly as possible."""
    least, more = divmod(inputs, updates)
    return (updates - more) * -(-least // rows) + more * -(-(least + 1) // rows)


def traffic(run: RunSettings, model: Sizes, processes: int, reshard: bool = True) -> Traffic | None:
    """Return the bytes of an iteration; None for texts, or without the model's configuration."""
    described = describe(run.model)
    if described is None or isinstance(run.model, LanguageSettings):
        return None
    wide, rank = BYTES[run.model.dtype], run.model.lora.rank if run.model.lora else None
    whole = sum(p.numel() for d in described.denoisers.values() for p in d.parameters())
    inside = sum(
        p.numel()
        for denoiser in described.denoisers.values()
        for block in blocks(denoiser)
        for p in block.parameters()
    )
    adapters = 0 if rank is None else model.adapters * rank
    gathered = inside * wide + adapters * max(4, wide)
    gradients = inside * wide if rank is None else adapters * max(4, wide)
    rest = (whole - inside) * wide if rank is None else 0
    calls = call_counts(
        run, processes, rows_per_call(run, model, "sampling"), rows_per_call(run, model, "training")
    )
    share = (processes - 1) / processes
    steps = 2 * run.train.optimizer_steps
    passes = calls.plain + (2 if reshard else 1) * calls.graded
    return Traffic(
        ddp=share * steps * (gradients + rest),
        fsdp2=share * (passes * gathered + calls.graded * gradients + steps * rest),
        calls=calls,
    )
