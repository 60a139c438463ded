"""A run small enough for tests: a tiny random pipeline, brightness as its reward."""

import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowrl.cli import main
from flowrl.errors import UserError
from flowrl.run.save import checkpoint
from flowrl.session import atomic
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings import RunSettings
from flowrl.settings.read import run_from
from flowrl.settings.trust import remember
from tests.support import tiny_pipelines

NFT = {"name": "nft", "steps": 4, "group": 4, "levels_per_sample": 2}
FLOW_GRPO = {"name": "flow_grpo", "steps": 4, "group": 4, "clip": 0.2}


def write_pipeline(folder: Path) -> Path:
    tiny_pipelines.sd3().save_pretrained(folder)
    return folder


def tree(pipeline: Path, folder: Path, recipe: dict[str, Any], **train: Any) -> dict[str, Any]:
    """Settings of a run; prompts are written into `folder`."""
    prompts = folder / "prompts.jsonl"
    texts = ("a red ball", "a blue cube on the table", "two small dogs", "a cat left of a ball")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return {
        "recipe": deepcopy(recipe),  # a test may change the settings of its run
        "model": {"pipeline": str(pipeline), "lora": {"rank": 4, "alpha": 8}, "device": "cpu"},
        "prompts": {"train": str(prompts), "held_out": str(prompts), "per_iteration": 2},
        "rewards": [{"name": "brightness"}],
        "train": {"iterations": 3, "lr": 1e-2, **train},
        "evaluate": {"every": 2, "steps": 3, "samples": 8, "per_prompt": 2},
        "checkpoint": {"every": 1},
        "track": {"images": 4},
    }


def sized(settings: dict[str, Any], sizes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The same run with columns added to its four prompts, all drawn in every iteration."""
    file = Path(settings["prompts"]["train"])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    pairs = zip(rows, sizes, strict=True)
    file.write_text("".join(json.dumps({**row, **size}) + "\n" for row, size in pairs))
    settings["model"] |= {"height": 16, "width": 16}
    settings["prompts"]["per_iteration"] = 4
    return settings


def write(settings: dict, folder: Path) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def flowrl(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(word) for word in words])
    return int(done.value.code)


def ended(*words: str | Path) -> None:
    """Run a command. UserError with what it says on standard error unless it ends with code 0."""
    said = io.StringIO()
    with redirect_stderr(said):
        code = flowrl(*words)
    if code:
        raise UserError(said.getvalue())


def copied_run(source: Path, target: Path) -> Path:
    """A copy of a run's folder that counts as begun here."""
    shutil.copytree(source, target)
    remember(target, yaml.safe_load((target / "run.yaml").read_text()))
    return target


def as_older(run: Path, *names: str) -> None:
    """Remove these facts of the start from a run's newest checkpoint, as if an older version had
    written it."""
    newest = checkpoint.newest(run)
    assert newest is not None
    state = json.loads((newest / "state.json").read_text())
    for name in names:
        del state["origin"][name]
    (newest / "state.json").write_text(json.dumps(state))
    (newest / atomic.CONTENTS).write_text(json.dumps(atomic.sums(newest)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def session(pipeline: Path, folder: Path, recipe: dict, **train: object) -> Session:
    return opened(tree(pipeline, folder, recipe, **train), folder)


def opened(settings: dict, folder: Path) -> Session:
    return session_of(run_from(settings, "test"), folder)


def session_of(run: RunSettings, folder: Path) -> Session:
    return open_session(run, folder, open_accelerator(run, folder))


def same_weights(first: Session, second: Session) -> bool:
    """Whether two sessions train the same weights, to the bit."""
    pairs = (each.learner.policies.parameters.values() for each in (first, second))
    return all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def check_resumed_bits(settings: dict, folder: Path) -> None:
    """Fail unless a run of two iterations ends with the same bits after an interruption."""
    settings["evaluate"] |= {"steps": 2, "samples": 2, "per_prompt": 1}
    config = write(settings, folder)
    whole, broken = folder / "whole", folder / "broken"
    assert flowrl("train", config, "--folder", whole) == 0
    assert flowrl("train", config, "--folder", broken, "--train.iterations", "1") == 0
    assert flowrl("train", "--resume", broken, "--train.iterations", "2") == 0
    for name in ("policies.safetensors", "optimizer.pt"):
        ends = [run / "checkpoints" / "000002" / name for run in (whole, broken)]
        assert ends[0].read_bytes() == ends[1].read_bytes()


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def start(*words: str | Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "flowrl", *map(str, words)]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment(), **quiet)


def weights(folder: Path, name: str = "adapter") -> dict[str, torch.Tensor]:
    return load_file(folder / name / "pytorch_lora_weights.safetensors")


def imported(path: Path) -> Any:
    """A file as a module of its name, as a script beside it would import it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
