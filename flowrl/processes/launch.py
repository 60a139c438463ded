"""What the user launched, and whether it is what came of it: some launchers start less than asked.

`accelerate launch --cpu --num_processes 2` starts one process without a word, and accelerate's FSDP
settings on CPUs give plain data parallelism. So the launcher's own words are read again here, and a
run that is not what they say stops with a sentence.
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
    """What is read of an `accelerate.Accelerator`."""

    @property
    def num_processes(self) -> int: ...

    @property
    def gradient_accumulation_steps(self) -> int: ...

    @property
    def mixed_precision(self) -> str: ...

    @property
    def distributed_type(self) -> DistributedType: ...


class LaunchOptions(NamedTuple):
    """By the words of `accelerate launch`; None where they do not say."""

    processes: int | None
    fsdp: bool


def asked(words: Sequence[str]) -> LaunchOptions | None:
    """Of a process's command line; None if that is no `accelerate launch`."""
    given = _after_launch(list(words))
    if given is None:
        return None
    try:
        args, _ = launch_command_parser().parse_known_args(given)
    except SystemExit:  # it said why
        return None
    path = args.config_file or (default_config_file if Path(default_config_file).is_file() else "")
    if not path or args.cpu:
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
    except psutil.Error:  # gone, or another user's
        return []


def sharding(accelerator: Launched) -> Sharding | None:
    """How weights are to be shared out; None for whole weights everywhere.

    UserError for a launch that did not give what it says, or that asks for what is not done here.
    """
    words, processes = asked(_parent()), accelerator.num_processes
    plugin = None
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        plugin = FullyShardedDataParallelPlugin()
    _check_count(words, processes)
    _check_unused(accelerator)
    if plugin is None:
        if words is not None and words.fsdp:
            raise UserError(
                "accelerate launch was told to use FSDP, and the processes know nothing of it: use "
                f"--config_file {CONFIGS}/fsdp2.yaml (on CPUs fsdp2_cpu_2.yaml) and not --cpu"
            )
        return None
    if plugin.fsdp_version != 2:
        raise UserError(
            f"this is FSDP version {plugin.fsdp_version}, and weights are shared out by FSDP2: set "
            f"fsdp_config.fsdp_version: 2, as {CONFIGS}/fsdp2.yaml does"
        )
    if processes == 1:
        raise UserError(
            "FSDP2 over one process shares nothing: start more, or leave the FSDP settings out"
        )
    if plugin.activation_checkpointing:
        raise UserError(
            "fsdp_activation_checkpointing of accelerate is not used: leave it out, and set "
            "train.gradient_checkpointing: true in the run's file"
        )
    return Sharding(
        bool(plugin.reshard_after_forward), isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    )


def _check_count(words: LaunchOptions | None, processes: int) -> None:
    if words is not None and words.processes is not None and words.processes > processes:
        raise UserError(
            f"accelerate launch was told {words.processes} processes, and this run has "
            f"{processes}: on CPUs it starts a single one unless its config has distributed_type: "
            f"MULTI_GPU and use_cpu: true, as {CONFIGS}/ddp_cpu_2.yaml has"
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != processes:
        raise UserError(
            f"WORLD_SIZE is {started}, and this run has {processes} processes: launch it with "
            "accelerate launch or torchrun, which set LOCAL_RANK and the rest"
        )
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1 and processes == 1:
        raise UserError(
            f"srun started {tasks} tasks that know nothing of each other: start one task a node, "
            "and in it accelerate launch, as scripts/launch/slurm.sh does"
        )


def _check_unused(accelerator: Launched) -> None:
    """Settings of accelerate that flowrl has its own for: never ignored without a word."""
    if accelerator.gradient_accumulation_steps != 1:
        raise UserError(
            f"gradient_accumulation_steps: {accelerator.gradient_accumulation_steps} of accelerate "
            "has nothing to act on: an optimizer step always takes all rows of its share, "
            "train.rows_per_call at a time; leave it out, and raise prompts.per_iteration or "
            "lower train.updates for larger batches"
        )
    if accelerator.mixed_precision != "no":
        raise UserError(
            f"mixed_precision: {accelerator.mixed_precision} of accelerate is not used: set "
            "mixed_precision: no there, and model.dtype: bfloat16 in the run's file"
        )
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise UserError(
            f"{kind.value} is not supported: use {CONFIGS}/ddp.yaml or {CONFIGS}/fsdp2.yaml"
        )
