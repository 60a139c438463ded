"""flow_grpo's own trainer for SD3 (arXiv:2505.05470), from its sources, one turn an iteration.

Replaced around it, not in it: its tracker (nothing is logged), its reward (one that does not look),
its evaluation (none), and for KL the attribute `module` of the trained network, which its loop
expects of a network that several processes share.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from scripts.gpu.peers import Job, Turns
from scripts.gpu.subjects import PROMPTS


def train(source: Path, job: Job, turns: Turns, folder: Path) -> None:
    sys.path.insert(0, str(source))
    sys.modules["wandb"] = tracker(turns)
    (folder / "train.txt").write_text("\n".join(PROMPTS) + "\n")
    (folder / "test.txt").write_text(PROMPTS[0] + "\n")
    program = loaded("flow_grpo_train_sd3", source / "scripts" / "train_sd3.py")
    program.FLAGS = SimpleNamespace(config=settings(source, job, folder))
    program.eval = lambda *_: None
    program.flow_grpo.rewards.multi_score = lambda *_: scored
    program.DistributedKRepeatSampler.set_epoch = set_epoch(turns, job.calls)
    program.PeftModel.module = property(lambda model: model)
    program.main(None)


def loaded(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def tracker(turns: Turns) -> ModuleType:
    """A tracker that writes nothing. Its loop logs `actual_batch_size` between sampling and update,
    and `loss` at each optimizer step."""
    module = ModuleType("wandb")

    def log(values: dict[str, Any], **_: Any) -> None:
        if "actual_batch_size" in values:
            turns.sampled()
        if "loss" in values:
            turns.figures["loss"] = float(values["loss"].detach())

    vars(module).update(init=lambda **_: None, log=log, Image=lambda *_, **__: None)
    return module


def scored(
    _: Any, prompts: Sequence[str], *more: Any, **named: Any
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Rewards of 0 to 3 in turn, as those of scripts/gpu/fixed.py. Images are not looked at."""
    del more, named
    return {"avg": [float(place % 4) for place in range(len(prompts))]}, {}


def set_epoch(turns: Turns, calls: int) -> Any:
    """Its loop tells the sampler the number of each batch: the first of an epoch begins an
    iteration. (So does accelerate, once, with a number that is not new.)"""
    seen = set[int]()

    def method(sampler: Any, epoch: int) -> None:
        if epoch % calls == 0 and epoch not in seen:
            turns.boundary()
        seen.add(epoch)
        sampler.epoch = epoch

    return method


def settings(source: Path, job: Job, folder: Path) -> Any:
    config = loaded("flow_grpo_base", source / "config" / "base.py").get_config()
    config.pretrained.model, config.dataset = job.model, str(folder)
    config.logdir = config.save_dir = str(folder)
    config.mixed_precision, config.prompt_fn = job.mixed, "general_ocr"
    config.resolution = job.side
    sample, update = config.sample, config.train
    sample.num_steps, sample.guidance_scale, sample.noise_level = job.steps, job.guidance, job.eta
    sample.train_batch_size = sample.num_image_per_prompt = job.rows
    sample.num_batches_per_epoch = job.calls
    update.batch_size, update.learning_rate, update.beta = job.rows, job.lr, job.kl
    update.gradient_accumulation_steps = job.calls // job.updates
    update.timestep_fraction = (job.trained + 0.5) / job.steps  # its loop rounds down
    return config
