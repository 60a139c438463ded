"""Flow-Factory's own trainer of flow_grpo for SD3.5, from its sources, one turn an iteration.

Its settings are those of its own example, at the job's rows. Its tracker is off, its evaluation
too; the reward is a class of its interface that does not look. Its data folder and its cache are
empty folders of the turn.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from scripts.gpu.peers import Job, Turns
from scripts.gpu.subjects import PROMPTS


def train(source: Path, job: Job, turns: Turns, folder: Path) -> None:
    sys.path.insert(0, str(source / "src"))
    globals()["Fixed"] = reward_class()
    file = folder / "settings.yaml"
    file.write_text(yaml.safe_dump(settings(job, folder)))
    (folder / "train.txt").write_text("\n".join(PROMPTS) + "\n")
    arguments = importlib.import_module("flow_factory.hparams").Arguments.load_from_yaml(str(file))
    trainer = importlib.import_module("flow_factory.trainers").load_trainer(arguments)
    optimize, log = trainer.optimize, trainer.log_data

    def continues() -> bool:
        turns.boundary()
        return True

    def update(samples: Any) -> None:
        turns.sampled()
        optimize(samples)

    def logged(values: dict[str, Any], step: int) -> None:
        if "train/loss" in values:
            turns.figures["loss"] = float(values["train/loss"])
        log(values, step)

    trainer.should_continue_training = continues
    trainer.optimize, trainer.log_data = update, logged
    trainer.start()


def reward_class() -> type:
    """A reward of its interface: 0 to 3 in turn, as scripts/gpu/fixed.py gives them."""
    interface = importlib.import_module("flow_factory.rewards.abc")
    base: Any = interface.PointwiseRewardModel

    class Fixed(base):
        def __call__(self, prompt: Sequence[str], **_: Any) -> Any:
            scores = [float(place % 4) for place in range(len(prompt))]
            return interface.RewardModelOutput(rewards=scores)

    return Fixed


def settings(job: Job, folder: Path) -> dict[str, Any]:
    return {
        "launcher": "accelerate", "num_processes": 1, "mixed_precision": job.mixed,
        "data": {
            "dataset_dir": str(folder), "preprocessing_batch_size": 2, "dataloader_num_workers": 0,
            "cache_dir": str(folder / "cache"), "sampler_type": "auto",
        },
        "model": {
            "finetune_type": "lora", "lora_rank": job.rank, "lora_alpha": job.alpha,
            "target_modules": "default", "model_name_or_path": job.model, "model_type": "sd3-5",
        },
        "log": {
            "run_name": "turns", "project": "turns", "logging_backend": "none",
            "save_dir": str(folder), "save_freq": 0,
        },
        "train": {
            "trainer_type": "grpo", "clip_range": 1.0, "adv_clip_range": 5.0,
            "kl_type": "x-based", "kl_beta": job.kl, "ref_param_device": job.device,
            "resolution": job.side, "num_inference_steps": job.steps,
            "guidance_scale": job.guidance, "per_device_batch_size": job.rows,
            "group_size": job.rows, "global_std": True,
            "unique_sample_num_per_epoch": job.calls, "gradient_step_per_epoch": job.updates,
            "gradient_accumulation_steps": "auto", "learning_rate": job.lr, "ema_decay": 0,
            "enable_gradient_checkpointing": False, "seed": 42,
            # its default, float16, cannot be concatenated under autocast on a CPU
            "latent_storage_dtype": "fp32" if job.mixed == "no" else "fp16",
        },
        "scheduler": {
            "dynamics_type": "Flow-SDE", "noise_level": job.eta, "num_sde_steps": job.trained,
            "sde_steps": list(range(job.trained)), "seed": 42,
        },
        "eval": {"eval_freq": 0, "resolution": job.side, "num_inference_steps": job.steps},
        "rewards": [{"name": "fixed", "reward_model": f"{__name__}.Fixed", "batch_size": job.rows,
                     "device": job.device}],
    }  # fmt: skip
