"""Launch files: what accelerate makes of them, and what the product makes of a launch."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
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


def start_of(world, *words: str, **more: Any) -> Sharding | None:
    """What one of the processes reads that `accelerate launch words` starts; `more`: fields of its
    Accelerator."""
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
        del os.environ[name]  # of the launch before; `world` brings the first ones back
    args = parsed([*words, "--main_process_port", "0", "x.py"])
    several = (args.use_fsdp or args.multi_gpu) and not args.cpu  # as `launch_command` decides
    processes = int(args.num_processes) if several else 1
    env = prepare_multi_gpu_env(args) if several else prepare_simple_launcher_cmd_env(args)[1]
    named = {n: v for n, v in env.items() if n.startswith(("FSDP_", "ACCELERATE_"))}
    world("accelerate launch " + " ".join([*words, "x.py"]), WORLD_SIZE=str(processes), **named)
    kind = DistributedType.FSDP if args.use_fsdp else DistributedType.MULTI_CPU
    precision = env["ACCELERATE_MIXED_PRECISION"]
    known = {"num_processes": processes, "distributed_type": kind, "mixed_precision": precision}
    return launch.sharding(state(**known | more))


def changed(folder: Path, name: str, old: str, new: str) -> str:
    """A copy of one of the product's launch files with another setting."""
    text = (PROJECT / launch.CONFIGS / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    return str(folder / name)


def test_what_is_said_of_a_launch_makes_it_start(world, tmp_path):
    whole = (PROJECT / launch.CONFIGS / "ddp_cpu_2.yaml").as_posix()
    shards = (PROJECT / launch.CONFIGS / "fsdp2_cpu_2.yaml").as_posix()
    made = advice(
        "accelerate launch was given FSDP, but the worker processes have no FSDP settings: "
        "use --config_file {}/fsdp2.yaml (on CPUs fsdp2_cpu_2.yaml) without --cpu",
        lambda: start_of(world, "--config_file", shards, "--cpu"),
        lambda: start_of(world, "--config_file", shards),
    )
    assert made == Sharding(reshard=True, offload=False)
    for words in (("--config_file", whole, "--cpu"), ("--cpu", "--num_processes", "2")):
        advice(
            "unless --cpu is left out and its config has distributed_type: MULTI_GPU",
            lambda words=words: start_of(world, *words),
            lambda: start_of(world, "--config_file", whole),
        )
    first = changed(tmp_path, "fsdp2_cpu_2.yaml", "fsdp_version: 2", "fsdp_version: 1")
    second = changed(tmp_path, "fsdp2.yaml", "num_processes: 8", "num_processes: 2")
    for file in (shards, second):
        made = advice(
            "FSDP version {} is not supported, only FSDP2: set fsdp_config.fsdp_version: 2, as in",
            lambda: start_of(world, "--config_file", first),
            lambda file=file: start_of(world, "--config_file", file),
        )
        assert made is not None and made.reshard
    one = changed(tmp_path, "fsdp2_cpu_2.yaml", "num_processes: 2", "num_processes: 1")
    for file in (shards, whole):
        made = advice(
            "FSDP2 needs several processes, not one: start more, or remove the FSDP settings",
            lambda: start_of(world, "--config_file", one),
            lambda file=file: start_of(world, "--config_file", file),
        )
        assert (made is None) == (file == whole)


def test_what_accelerate_is_not_asked_for_is_removed(world, tmp_path):
    whole = (PROJECT / launch.CONFIGS / "ddp_cpu_2.yaml").as_posix()
    shards = (PROJECT / launch.CONFIGS / "fsdp2_cpu_2.yaml").as_posix()
    remade = changed(
        tmp_path, "fsdp2_cpu_2.yaml", "fsdp_version: 2",
        "fsdp_version: 2\n  fsdp_activation_checkpointing: true",
    )  # fmt: skip
    advice(
        "accelerate's fsdp_activation_checkpointing has no effect here: remove it",
        lambda: start_of(world, "--config_file", remade),
        lambda: start_of(world, "--config_file", shards),
    )
    advice(
        "accelerate's gradient_accumulation_steps: {} has no effect",
        lambda: start_of(world, "--config_file", shards, gradient_accumulation_steps=4),
        lambda: start_of(world, "--config_file", shards),
    )
    half = changed(tmp_path, "ddp_cpu_2.yaml", 'mixed_precision: "no"', "mixed_precision: bf16")
    advice(
        'accelerate\'s mixed_precision: {} has no effect: set mixed_precision: "no" there',
        lambda: start_of(world, "--config_file", half),
        lambda: start_of(world, "--config_file", whole),
    )
    bare = changed(tmp_path, "ddp_cpu_2.yaml", 'mixed_precision: "no"', "mixed_precision: no")
    with pytest.raises(AttributeError):  # accelerate's own, of a config without quotation marks
        start_of(world, "--config_file", bare)
    deep = {"distributed_type": DistributedType.DEEPSPEED}
    for name in ("ddp", "fsdp2"):
        file = (PROJECT / launch.CONFIGS / f"{name}.yaml").as_posix()
        advice(
            "{} is not supported: use {}/ddp.yaml or {}/fsdp2.yaml",
            lambda: start_of(world, "--multi_gpu", "--num_processes", "8", **deep),
            lambda file=file: start_of(world, "--config_file", file),
        )


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
