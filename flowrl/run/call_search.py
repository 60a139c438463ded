"""Choose rows per call on a GPU by measuring the peak memory of calls of one and two rows."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.estimate.memory import estimate
from flowrl.models.call_sizes import CallTooLarge, bounded_call
from flowrl.models.diffusers.batch import Driven
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.models.diffusers.sizes.by_size import rows_by_size
from flowrl.session.session import Session
from flowrl.settings import RunSettings
from flowrl.settings.sections.train import CallKind

SHARE = 0.8  # of the free memory: the rest is for fragments, and for longer prompts
MOST_ROWS = 256
LATER = ("gradients", "optimizer", "merged weights")  # parts of a run, or of its rewriter


def search_sizes(session: Session) -> None:
    """Find the call sizes that `train.rows_per_call` leaves open, the smallest over all processes.

    On a CPU they stay at the settings' number, which is the same on every machine.
    """
    policy, settings = session.learner.policy, session.run.train.call_sizes
    kinds: list[CallKind] = [kind for kind, rows in settings.items() if rows == "auto"]
    if not kinds or session.parallel.device != "cuda" or session.parallel.lockstep is not None:
        return
    if isinstance(policy, TriesTexts):
        calls = _of_texts(session, policy)
        kinds = [kind for kind in kinds if kind in calls]
    elif isinstance(policy, Driven):
        calls = _calls(session, policy)
    else:
        return
    free = _free() - later_bytes(session.run, session.parallel.processes)
    rows_by_kind = {
        kind: rows_that_fit(lambda n, k=kind: _peak(calls[k], n), free) for kind in kinds
    }
    for of_process in session.parallel.every(rows_by_kind):
        rows_by_kind = {kind: min(rows, of_process[kind]) for kind, rows in rows_by_kind.items()}
    policy.sizes.take({**vars(policy.sizes), **rows_by_kind})


def later_bytes(run: RunSettings, processes: int) -> int:
    """Bytes that each process holds after its first iteration but not yet at its start: gradients,
    the optimizer's moments, merged weights, stored states, and media until they are scored. Rewards
    and averages are there already. 0 if unknown."""
    planned = estimate(run)
    if planned is None:
        return 0
    own_draws = planned.media + planned.parts.get("states", 0)
    later = sum(size for name, size in planned.parts.items() if name.endswith(LATER))
    return later + -(-own_draws // processes)


def rows_that_fit(peak: Callable[[int], int], free: int) -> int:
    """Largest power of two of rows whose peak memory, extrapolated from one and two rows, stays
    within SHARE of the `free` bytes; at least 1.

    peak: returns the bytes that a call of this many rows needs. The result is tried, and halved
    while it raises CallTooLarge.
    """
    one = peak(1)
    try:
        two = peak(2)
    except CallTooLarge:
        return 1
    per_row = max(two - one, 1)
    room = (SHARE * free - (one - per_row)) / per_row
    rows = 1
    while rows * 2 <= min(room, MOST_ROWS):
        rows *= 2
    while rows > 2:
        try:
            peak(rows)
            return rows
        except CallTooLarge:
            rows //= 2
    return rows


def _calls(session: Session, policy: Driven) -> dict[CallKind, Callable[[int], object]]:
    """A call of each kind as a function of its rows."""
    steps = session.algorithm.steps
    prompts, meta = session.prompts.take([0])
    if isinstance(policy, PipelinePolicy) and len(policy.used) > 1:
        groups = rows_by_size(policy, session.prompts.texts, session.prompts.meta)
        largest = max(groups, key=lambda group: math.prod(group.policy.shape(steps)))
        policy, (prompts, meta) = largest.policy, session.prompts.take(largest.rows[:1])
    conditioning: Any = policy.encode(prompts, meta)
    sigma, shape = policy.schedule(steps).sigmas[0], policy.shape(steps)

    def velocity(rows: int, guidance: float | None) -> Tensor:
        bound = policy.bind(conditioning, steps=steps, guidance=guidance)
        x = torch.zeros(rows, *shape, device=policy.device, dtype=policy.arithmetic)
        index = torch.zeros(rows, dtype=torch.long, device=policy.device)
        return bound(x, torch.full((rows,), sigma, device=policy.device), index)

    @torch.no_grad()
    def sampling(rows: int) -> None:
        velocity(rows, policy.guidance.sample)

    def training(rows: int) -> None:
        velocity(rows, policy.guidance.train).square().mean().backward()
        session.learner.policies.forget_gradients()

    def decoding(rows: int) -> None:
        x0 = torch.zeros(rows, *shape, device=policy.device, dtype=policy.arithmetic)
        row_conditioning = conditioning.take(torch.zeros(rows, dtype=torch.long))
        policy.decode(x0, row_conditioning, steps=steps, guidance=policy.guidance.sample)

    return {"sampling": sampling, "decoding": decoding, "training": training}


@runtime_checkable
class TriesTexts(Protocol):
    """A text policy, which makes trial calls itself."""

    def trial_calls(
        self, prompts: Sequence[str], steps: int
    ) -> Mapping[CallKind, Callable[[int], object]]: ...


def _of_texts(session: Session, policy: TriesTexts) -> dict[CallKind, Callable[[int], object]]:
    calls = dict(policy.trial_calls(session.prompts.texts, session.algorithm.steps))
    if not calls:
        return {}
    train = calls["training"]

    def training(rows: int) -> None:
        train(rows)
        session.learner.policies.forget_gradients()

    return {**calls, "training": training}


def _peak(call: Callable[[int], object], rows: int) -> int:
    """GPU memory, in bytes, that a call needs in addition to the memory already held."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with bounded_call("sampling"):
        call(rows)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _free() -> int:
    """Bytes that this process can still use, including the bytes that its allocator caches."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
