"""Whether a run fits in a device's memory, and the settings that lower its memory."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from flowrl.errors import UserError
from flowrl.estimate import sizes
from flowrl.estimate.devices import DeviceGroup
from flowrl.estimate.memory import estimate, rows_per_call, size
from flowrl.models.description import unknown_because
from flowrl.settings import PipelineSettings, RunSettings
from flowrl.settings.checks.sharding import can_be_sharded
from flowrl.settings.read import override

UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}
# changes that save memory, the least harmful first
CHANGES = (
    "--train.gradient-checkpointing",
    "--model.offload",
    "--model.vae.slicing",
    "--model.offload-experts",
    "--train.states.device cpu",
    "--train.rows-per-call",
    "--train.optimizer adamw8bit",
    "--model.dtype bfloat16",
)


def parsed(text: str) -> int:
    """Parse a size such as "24GiB" into bytes. UserError for anything else."""
    match = re.fullmatch(r"([0-9]+\.?[0-9]*) ?(GiB|GB|MiB|MB)", text)
    if match is None:
        raise UserError(f"--memory: {text!r} is not a size; write it as 24GiB or 80GB")
    return int(float(match[1]) * UNITS[match[2]])


def advice(run: RunSettings, limit: int | None = None) -> list[str]:
    """Settings that lower the estimate, with their savings, until the limit is met."""
    first = estimate(run)
    if first is None:
        return []
    changes, changed, before = [], run, first
    for change in CHANGES:
        words = _words(change, changed)
        if words is None or (limit is not None and before.total <= limit):
            continue
        trial = override(changed, words)
        after = estimate(trial)
        assert after is not None
        saved = before.total - after.total
        if saved > 0.01 * first.total:
            setting = f"{words[0].removeprefix('--').replace('-', '_')}: {_value(words)}"
            changes.append(f"{setting} (saves about {size(saved)})")
            changed, before = trial, after
    return changes


def _words(change: str, run: RunSettings) -> list[str] | None:
    """Return the words of an override; None if the run already has it, or it does not apply."""
    name, *value = change.split()
    m, t = run.model, run.train
    if isinstance(m, PipelineSettings) and name in _SAVED_BY_PIPELINES:
        return [name] if _SAVED_BY_PIPELINES[name](run, m) else None
    match name:
        case "--train.gradient-checkpointing":
            return None if t.gradient_checkpointing else [name]
        case "--train.states.device":
            pipeline = isinstance(m, PipelineSettings)
            moves = pipeline and not run.algorithm().reward_gradient and t.states.device is None
            return [name, *value] if moves else None
        case "--train.rows-per-call":
            seen = sizes.of(run.trained_model, run.algorithm().steps)
            rows = 1 if seen is None else rows_per_call(run, seen, "training")
            return None if rows == 1 else [name, "1" if rows < 8 else str(rows // 8)]
        case "--train.optimizer":
            return None if t.optimizer == value[0] else [name, *value]
        case "--model.dtype":
            return None if m.dtype != "float32" else [name, *value]
    return None


def _keeps_unused_experts(run: RunSettings, m: PipelineSettings) -> bool:
    """Whether one of several denoisers waits on the device, and may wait elsewhere."""
    if m.lora is None or m.offload_experts or m.compile:
        return False
    seen = sizes.of(run.trained_model, run.algorithm().steps)
    return seen is not None and seen.largest < seen.trained


# savings that only pipelines have, and whether a run still lacks one
_SAVED_BY_PIPELINES: Mapping[str, Callable[[RunSettings, PipelineSettings], bool]] = {
    "--model.offload": lambda _, m: not m.offload,
    "--model.vae.slicing": lambda _, m: not m.vae.slicing,
    "--model.offload-experts": _keeps_unused_experts,
}


def _value(words: list[str]) -> str:
    return words[1] if len(words) > 1 else "true"


@dataclass(frozen=True)
class MemoryLimit:
    """Memory of one device, None if unknown; `whose` names the device, and `processes` is the
    number of devices."""

    most: int | None
    whose: str = ""
    processes: int = 1


def limit(memory: str | None, devices: DeviceGroup | None = None) -> MemoryLimit:
    """The limit from `--memory`, or `--devices`, or the visible GPU."""
    count = 1 if devices is None else devices.number
    if memory is not None:
        return MemoryLimit(parsed(memory), "--memory", count)
    if devices is not None:
        return MemoryLimit(int(devices.kind.memory * 10**9), devices.name, count)
    if not torch.cuda.is_available():
        return MemoryLimit(None)
    device = torch.cuda.get_device_properties(0)
    return MemoryLimit(device.total_memory, device.name)


def fits(run: RunSettings, limit: MemoryLimit, iteration: int = 0) -> bool:
    """Whether the estimate is within the limit, sharded over several devices; True if either is
    unknown."""
    if limit.most is None:
        return True
    needed = estimate(run, iteration)
    if needed is None:
        return True
    return needed.total <= limit.most or (
        can_be_sharded(run) and needed.sharded(limit.processes).total <= limit.most
    )


def memory_report(run: RunSettings, limit: MemoryLimit, iteration: int = 0) -> str:
    """Text for `flowrl plan`: the estimate, whether it fits, and changes that make it fit."""
    needed = estimate(run, iteration)
    if needed is None:
        return f"memory: unknown, since {unknown_because(run.model)}"
    if limit.most is None:
        return str(needed)
    into = f"{size(limit.most)} ({limit.whose})"
    if needed.total <= limit.most:
        return f"{needed}; fits in {into}"
    shards = needed.sharded(limit.processes)
    sharding = can_be_sharded(run)
    if sharding and shards.total <= limit.most:
        return (
            f"{needed}; does not fit in {into} as a whole, but sharded over {limit.processes} "
            f"processes (FSDP2: docs/processes.md) each needs about {size(shards.total)}"
        )
    changes = advice(run, limit.most)
    way = f": set {', '.join(changes)}" if changes else ""
    smaller = "smaller images, or adapters (model.lora)" if run.model.lora is None else ""
    end = way or f": {smaller or 'smaller images, or a smaller model'}"
    of_each = ""
    if sharding and limit.processes > 1:
        of_each = f" (sharded over {limit.processes} processes: {size(shards.total)} each)"
    return f"{needed}; does not fit in {into}{of_each}{end}"
