"""A run small enough for tests: a tiny random pipeline, brightness as its reward."""

import json
from pathlib import Path
from typing import Any

from tests import tiny_pipelines

NFT = {"name": "nft", "steps": 4, "group": 4, "draws": 2}
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
        "recipe": recipe,
        "model": {"pipeline": str(pipeline), "lora": {"rank": 4, "alpha": 8}, "device": "cpu"},
        "prompts": {"train": str(prompts), "held_out": str(prompts), "per_iteration": 2},
        "rewards": [{"name": "brightness"}],
        "train": {"iterations": 3, "lr": 1e-2, **train},
        "evaluate": {"every": 2, "steps": 3, "samples": 8, "per_prompt": 2},
        "checkpoint": {"every": 1},
        "track": {"images": 4},
    }
