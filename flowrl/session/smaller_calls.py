"""Repeat work with half the rows per call after an out-of-memory error, or explain the error."""

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from flowrl.errors import UserError, after, made_call
from flowrl.estimate import fit, memory
from flowrl.models.call_sizes import CallTooLarge, HasSizes
from flowrl.models.out_of_memory import memory_reason, out_of_memory
from flowrl.session.learner import Learner
from flowrl.session.live import of_callback
from flowrl.session.record import Terminal
from flowrl.settings import PipelineSettings, RunSettings
from flowrl.settings.read import dump, override

T = TypeVar("T")

PLAIN_WAY = "train.rows_per_call lower"  # every run has it


def with_smaller_calls(
    learner: Learner, terminal: Terminal, do: Callable[[], T], policy: HasSizes | None = None
) -> T:
    """Call `do`, and restart it with fewer rows per call of `policy` while it runs out of memory.

    Results depend only on the sizes, so a run that is resumed with its checkpoint's lowered sizes
    has the same bits. All processes lower the sizes and repeat together: `Parallel.together` raises
    the error on all of them. CallTooLarge if that is impossible (inside a collective call, or after
    an optimizer step), or if a call already has one row.
    """
    sizes = (learner.policy if policy is None else policy).sizes
    while True:
        try:
            return do()
        except CallTooLarge as error:
            agreed = error.agreed or learner.parallel.processes == 1
            if not (agreed and error.repeatable):
                raise
            before = str(sizes)
            lowered = [sizes.lower(kind) for kind in sorted(error.kinds)]
            if False in lowered:
                raise
            reason = memory_reason(error)
        terminal.warn(
            f"out of memory ({reason}); rows per call are now {sizes}, previously {before}"
        )
        _free()


def _free() -> None:
    """Free the memory of failed calls, once no error refers to it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def saved_sizes(learner: Learner) -> dict[str, Any]:
    """Call sizes for a checkpoint, with the setting that they come from."""
    policies = {"train": learner.policy, "evaluate": learner.evaluator}
    sizes = {name: vars(policy.sizes) for name, policy in policies.items()}
    return {**sizes, "setting": _setting(learner)}


def take_sizes(learner: Learner, saved: Mapping[str, Any]) -> bool:
    """Restore call sizes from a checkpoint; False if `train.rows_per_call` has changed since."""
    if saved["setting"] != _setting(learner):
        return False
    learner.policy.sizes.take(saved["train"])
    learner.evaluator.sizes.take(saved["evaluate"])
    return True


def _setting(learner: Learner) -> Any:
    return dump(learner.run)["train"]["rows_per_call"]


@contextmanager
def explained(
    run: RunSettings, policy: HasSizes | None = None, trains: bool = True, fewer: str = ""
) -> Iterator[None]:
    """Turn an out-of-memory error of the run into a UserError that names settings to change, based
    on the policy's current call sizes. Errors of rewards, judges and callbacks pass through.

    trains  False for a command or call that only samples, which has other settings to change
    fewer   what it could be given less of, such as prompts
    """
    try:
        yield
    except Exception as error:
        if of_callback(error) or not out_of_memory(error):
            raise
        advice = (lambda: _advice(run, policy)) if trains else (lambda: ("", _sampling_way(run)))
        about, way = after(error, advice, ("", PLAIN_WAY))
        call = made_call()  # a run's own sentence has its folder and how to resume
        named = f"{call}: " if not trains and call.startswith("flowrl.") else ""
        way += f", or give fewer {fewer}" if fewer else ""
        raise UserError(
            f"{named}out of memory ({memory_reason(error)}){about}: set {way}"
        ) from error


def _advice(run: RunSettings, policy: HasSizes | None) -> tuple[str, str]:
    """The memory that the run needs, and settings that lower it."""
    if policy is not None:
        now = {kind: rows for kind, rows in vars(policy.sizes).items() if rows is not None}
        run = override(run, ["--train.rows-per-call", json.dumps(now)] if now else [])
    needed, changes = memory.estimate(run), fit.advice(run)
    about = "" if needed is None else f"; the run needs about {memory.size(needed.total)}"
    return about, ", ".join(changes) if changes else _plain_way(run)


def _plain_way(run: RunSettings) -> str:
    """Settings that lower the memory of a run whose sizes are unknown, as far as it has them."""
    words = [PLAIN_WAY]
    words += [] if run.train.gradient_checkpointing else ["train.gradient_checkpointing: true"]
    return ", ".join(words + _of_weights(run))


def _sampling_way(run: RunSettings) -> str:
    """Settings that lower the memory of sampling."""
    words = [PLAIN_WAY, *_of_weights(run)]
    words += ["model.dtype: bfloat16"] * (run.model.dtype == "float32")
    images = isinstance(run.model, PipelineSettings)
    return ", ".join(words) + (", or a smaller height and width" if images else "")


def _of_weights(run: RunSettings) -> list[str]:
    moves = isinstance(run.model, PipelineSettings) and not run.model.offload
    return ["model.offload: true"] if moves else []
