"""Compare the launcher's options with the processes that it started, since some launchers start
fewer.

`accelerate launch --cpu --num_processes 2` silently starts one process, and so does --cpu beside a
config for several or for FSDP. So the launcher's command line is parsed again here, and a run that
does not match it stops with an error.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import psutil
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy

from flowrl.errors import UserError
from flowrl.processes.sharding import Sharding

CONFIGS = "configs/accelerate"


@runtime_checkable
class Launched(Protocol):
    """The fields of an `accelerate.Accelerator` that this module reads."""

    @property
    def num_processes(self) -> int: ...

    @property
    def gradient_accumulation_steps(self) -> int: ...

    @property
    def mixed_precision(self) -> str: ...

    @property
    def distributed_type(self) -> DistributedType: ...


class LaunchOptions(NamedTuple):
    """Options of `accelerate launch`; None if not given."""

    processes: int | None
    fsdp: bool


def launch_options(words: Sequence[str]) -> LaunchOptions | None:
    """Parse a process's command line; None if it was not started by `accelerate launch`."""
    options = _after_launch(list(words))
    if options is None:
        return None
    try:
        args, _ = launch_command_parser().parse_known_args(options)
    except SystemExit:  # argparse printed the reason
        return None
    # --cpu keeps accelerate from its default file, but not from the one that is named
    default = "" if args.cpu or not Path(default_config_file).is_file() else default_config_file
    path = args.config_file or default
    if not path:
        return LaunchOptions(args.num_processes, args.use_fsdp)
    config: Any = load_config_from_file(path)
    processes = args.num_processes if args.num_processes is not None else config.num_processes
    return LaunchOptions(
        processes, args.use_fsdp or config.distributed_type == DistributedType.FSDP
    )


def _after_launch(words: list[str]) -> list[str] | None:
    for i, word in enumerate(words):
        if word == "accelerate.commands.launch":
            return words[i + 1 :]
        if word == "launch" and i and Path(words[i - 1]).name == "accelerate":
            return words[i + 1 :]
        if Path(word).name == "accelerate-launch":
            return words[i + 1 :]
    return None


def _parent() -> list[str]:
    try:
        parent = psutil.Process().parent()
        return [] if parent is None else parent.cmdline()
    except psutil.Error:  # it ended, or belongs to another user
        return []


def sharding(accelerator: Launched) -> Sharding | None:
    """The sharding of the weights; None if every process holds all of them.

    UserError if the processes do not match the launch options, or for unsupported options.
    """
    words, processes = launch_options(_parent()), accelerator.num_processes
    plugin = None
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        _check_version(os.environ.get("FSDP_VERSION", "1"))
        plugin = FullyShardedDataParallelPlugin()
    if plugin is None and words is not None and words.fsdp:
        raise UserError(
            "accelerate launch was given FSDP, but the worker processes have no FSDP settings: "
            f"use --config_file {CONFIGS}/fsdp2.yaml (on CPUs fsdp2_cpu_2.yaml) without --cpu"
        )
    _check_count(words, processes)
    _check_unused(accelerator)
    if plugin is None:
        return None
    if processes == 1:
        raise UserError(
            "FSDP2 needs several processes, not one: start more, or remove the FSDP settings"
        )
    if plugin.activation_checkpointing:
        raise UserError(
            "accelerate's fsdp_activation_checkpointing has no effect here: remove it, and set "
            "train.gradient_checkpointing: true in the run's file"
        )
    return Sharding(
        bool(plugin.reshard_after_forward), isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    )


def _check_version(version: str) -> None:
    """UserError for another version than FSDP2, before accelerate makes its plugin of it, which on
    CPUs fails for version 1 with words about devices."""
    if version != "2":
        raise UserError(
            f"FSDP version {version} is not supported, only FSDP2: set "
            f"fsdp_config.fsdp_version: 2, as in {CONFIGS}/fsdp2.yaml"
        )


def _check_count(words: LaunchOptions | None, processes: int) -> None:
    if words is not None and words.processes is not None and words.processes > processes:
        raise UserError(
            f"accelerate launch was given {words.processes} processes, but this run has "
            f"{processes}: on CPUs it starts only one, unless --cpu is left out and its config has "
            f"distributed_type: MULTI_GPU and use_cpu: true, as in {CONFIGS}/ddp_cpu_2.yaml"
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != processes:
        raise UserError(
            f"WORLD_SIZE is {started}, but this run has {processes} processes: launch it with "
            "accelerate launch or torchrun, which set LOCAL_RANK and the other variables"
        )
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1 and processes == 1:
        raise UserError(
            f"srun started {tasks} tasks without a common process group: start one task per "
            "node that runs accelerate launch, as `flowrl launch slurm` does"
        )


def _check_unused(accelerator: Launched) -> None:
    """Refuse settings of accelerate that have no effect because flowrl has its own."""
    if accelerator.gradient_accumulation_steps != 1:
        raise UserError(
            f"accelerate's gradient_accumulation_steps: {accelerator.gradient_accumulation_steps} "
            "has no effect: an optimizer step always takes all rows of its share, "
            "train.rows_per_call at a time; remove it, and raise prompts.per_iteration or "
            "lower train.updates for larger batches"
        )
    if accelerator.mixed_precision != "no":
        raise UserError(
            f"accelerate's mixed_precision: {accelerator.mixed_precision} has no effect: set "
            'mixed_precision: "no" there, with its quotation marks (YAML reads the bare word as '
            "false), and model.dtype: bfloat16 in the run's file"
        )
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise UserError(
            f"{kind.value} is not supported: use {CONFIGS}/ddp.yaml or {CONFIGS}/fsdp2.yaml"
        )
