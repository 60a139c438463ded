"""Presets whose rewards are large scalar heads train on tiny files in the published layouts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.paths import PROJECT
from flowrl.settings.read import dump, read_run
from tests.rewards.test_scalar_heads import CPU, Hps, Video
from tests.support import tiny_pipelines, tiny_pipelines_image
from tests.support.runs import flowrl, lines, write

SQUARE = {"height": 16, "width": 16}
TEXT = {"max_sequence_length": tiny_pipelines.TOKENS}

torch.set_num_threads(1)


def trained(folder: Path, preset: str, pipe: Any, reward: dict, call: dict, recipe: dict) -> dict:
    """The last metrics of a preset on a tiny pipeline, its reward with files of its own."""
    pipe.save_pretrained(folder / "pipe")
    (folder / "prompts.txt").write_text("a red ball\ntwo cats\n")
    settings = dump(read_run(PROJECT / "configs" / "papers" / f"{preset}.yaml"))
    model = {"pipeline": str(folder / "pipe"), "device": "cpu", "dtype": "float32"}
    settings["model"] = {**model, **SQUARE, "lora": {"rank": 2}, "call": call}
    settings["recipe"] |= recipe
    prompts = str(folder / "prompts.txt")
    settings["prompts"] = {"train": prompts, "held_out": prompts, "per_iteration": 1}
    (given,) = settings["rewards"]
    settings["rewards"] = [given | reward]
    settings.pop("held_out_rewards", None)
    settings["train"] |= {"iterations": 1, "rows_per_call": 4, "updates": 1}
    settings["evaluate"] |= {"every": 1, "steps": 2, "samples": 2}
    assert flowrl("train", write(settings, folder), "--folder", folder / "run") == 0
    return lines(folder / "run")[-1]


@pytest.mark.slow
def test_temp_flow_with_hpsv3_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.catalogue.hpsv3.PIXELS", 56 * 56)
    reward = Hps(tmp_path, monkeypatch).write(tmp_path / "head.safetensors") | CPU
    recipe = {"steps": 4, "roots": 1, "branch": 2}
    pipe = tiny_pipelines_image.flux()
    metrics = trained(tmp_path, "temp_flow_flux_hpsv3", pipe, reward, TEXT, recipe)
    assert metrics["grad_norm"] > 0 and math.isfinite(metrics["held_out/hpsv3"])


@pytest.mark.slow
def test_dance_grpo_with_videoalign_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judge").mkdir()
    reward = Video(tmp_path / "judge", monkeypatch).settings
    preset, pipe = "dance_grpo_hunyuan_video", tiny_pipelines.wan()
    call, recipe = TEXT | {"num_frames": 5}, {"steps": 4, "group": 2}
    metrics = trained(tmp_path, preset, pipe, reward, call, recipe)
    name = "held_out/videoalign.visual_quality"
    assert metrics["grad_norm"] > 0 and math.isfinite(metrics[name])
