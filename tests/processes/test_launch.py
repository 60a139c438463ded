"""Launch files: what accelerate makes of them, and what the product makes of a launch."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from torch import nn

from flowrl.errors import UserError
from flowrl.paths import PROJECT
from flowrl.processes import launch, sharding
from flowrl.processes.launch import LaunchOptions, launch_options
from flowrl.processes.sharding import Sharding
from flowrl.session import signals
from tests.support.advice import advice

FILES = sorted((PROJECT / "configs/accelerate").glob("*.yaml"))


def parsed(words):
    """The arguments of `accelerate launch`, with its config file's values in them."""
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return args


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_reads_each_config_and_starts_all_processes(path):
    config = load_config_from_file(str(path))
    assert config.mixed_precision == "no"
    args = parsed(["--config_file", str(path), "-m", "flowrl"])
    fsdp = path.stem.startswith("fsdp2")
    assert args.use_fsdp == fsdp and args.multi_gpu == (not fsdp)  # else it starts one process
    wanted = 2 if "cpu" in path.stem else 16 if "nodes" in path.stem else 8
    assert args.num_processes == wanted
    assert args.num_machines == (2 if "nodes" in path.stem else 1)
    assert not fsdp or int(args.fsdp_version) == 2
    words = ["python", "-m", "accelerate.commands.launch", "--config_file", str(path), "-m", "x"]
    assert launch_options(words) == LaunchOptions(wanted, fsdp)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            "python -m accelerate.commands.launch --cpu --num_processes 2 -m flowrl",
            LaunchOptions(2, False),
        ),
        (
            "/env/bin/python /env/bin/accelerate launch --num_processes 4 x.py",
            LaunchOptions(4, False),
        ),
        ("/env/bin/accelerate-launch --use_fsdp --num_processes 3 x.py", LaunchOptions(3, True)),
        ("bash", None),
        ("python -m flowrl train launch", None),
    ],
)
def test_the_launchers_words_are_read_again(words, wanted):
    assert launch_options(words.split()) == wanted


def state(**more):
    """As much of an Accelerator as is looked at."""
    known = {"num_processes": 2, "gradient_accumulation_steps": 1, "mixed_precision": "no"}
    return SimpleNamespace(**{**known, "distributed_type": DistributedType.MULTI_CPU, **more})


@pytest.fixture
def world(monkeypatch):
    """The environment of one of two processes that were launched as `launched` says."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
        monkeypatch.delenv(name)

    def launched(said=None, **environment):
        monkeypatch.setattr(launch, "_parent", lambda: (said or "bash").split())
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    launched()
    return launched


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def test_what_the_launch_asks_for_is_what_comes(world):
    assert launch.sharding(state()) is None
    world(**FSDP)
    assert launch.sharding(state()) == Sharding(reshard=True, offload=False)
    world(FSDP_RESHARD_AFTER_FORWARD="false", FSDP_OFFLOAD_PARAMS="true")
    assert launch.sharding(state()) == Sharding(reshard=False, offload=True)


@pytest.mark.parametrize(
    ("said", "environment", "more", "sentence"),
    [
        ("accelerate launch --num_processes 4 x.py", {}, {}, "given 4 processes, but .* has 2"),
        ("accelerate launch --use_fsdp x.py", {}, {}, "given FSDP, but the worker"),
        (None, FSDP | {"FSDP_VERSION": "1"}, {}, "FSDP version 1.*fsdp_version: 2"),
        (None, FSDP | {"WORLD_SIZE": "1"}, {"num_processes": 1}, "several processes, not one"),
        (None, FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "gradient_checkpointing"),
        (None, {}, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: 4.*rows_per"),
        (None, {}, {"mixed_precision": "bf16"}, "mixed_precision: bf16.*model.dtype: bfloat16"),
        (None, {}, {"distributed_type": DistributedType.DEEPSPEED}, "DEEPSPEED is not supported"),
    ],
)  # fmt: skip
def test_what_would_be_ignored_is_refused(world, said, environment, more, sentence):
    world(said, **environment)
    with pytest.raises(UserError, match=sentence):
        launch.sharding(state(**more))


def started(world, processes, **environment):
    world(**environment)
    return launch.sharding(state(num_processes=processes))


def test_processes_that_nobody_joined_are_launched(world):
    """torchrun and accelerate launch set WORLD_SIZE to the number of processes that a run then has;
    the script of `flowrl launch slurm` starts one task on each of two machines here."""
    advice(
        "WORLD_SIZE is {}, but this run has {} processes: launch it with accelerate launch or "
        "torchrun, which set LOCAL_RANK and the other variables",
        lambda: started(world, 1, WORLD_SIZE="8"),
        lambda: started(world, 8, WORLD_SIZE="8", LOCAL_RANK="0"),
    )
    advice(
        "srun started {} tasks without a common process group: start one task per node that runs "
        "accelerate launch, as `flowrl launch slurm` does",
        lambda: started(world, 1, WORLD_SIZE="1", SLURM_STEP_NUM_TASKS="16"),
        lambda: started(world, 16, WORLD_SIZE="16", SLURM_STEP_NUM_TASKS="2"),
    )


def test_a_model_without_blocks_is_launched_without_fsdp(world, monkeypatch):
    monkeypatch.setattr(sharding, "init_device_mesh", lambda *_: None)
    monkeypatch.setattr(sharding.dist, "get_world_size", lambda: 2)
    how = Sharding(reshard=True, offload=False)

    def of_ddp():
        args = parsed(["--config_file", str(PROJECT / "configs/accelerate/ddp.yaml"), "x.py"])
        assert args.multi_gpu and not args.use_fsdp
        return started(world, 2)

    said = advice(
        "FSDP2: {} ({}) has no list of blocks to shard; launch with configs/accelerate/ddp.yaml",
        lambda: sharding.shard({"model": nn.Linear(2, 2)}, how, torch.device("cpu")),
        of_ddp,
    )
    assert said is None, "every process holds the whole model"


def test_what_a_launcher_passes_on_is_no_second_signal(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setenv(signals.LAUNCHED, "none")
    asked = signals.Interrupt()
    asked._note(signal.SIGINT, None)
    asked._note(signal.SIGTERM, None)
    assert asked.signal == signal.SIGINT
    clock[0] += 10
    with pytest.raises(KeyboardInterrupt):
        asked._note(signal.SIGINT, None)
    monkeypatch.delenv(signals.LAUNCHED)
    alone = signals.Interrupt()
    alone._note(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        alone._note(signal.SIGINT, None)
