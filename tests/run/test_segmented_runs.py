"""Whole runs of videos that are made in segments (Wan-Animate 2): first ratios, and interrupted
runs beside the run in one go."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from tests.support import runs
from tests.support.flex_on_cpu import flex_on_cpu
from tests.support.tiny_modular import MODULAR, MODULAR_CALLS

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
RECIPES: dict[str, dict[str, Any]] = {
    "flow_grpo": {"name": "flow_grpo", "steps": 3, "group": 2, "clip": 0.2},
    "nft": {"name": "nft", "steps": 3, "group": 2},
    "branch_grpo": {"name": "branch_grpo", "steps": 3, "at": [0, 1], "clip": 0.2},
}
# frames of the driving video: of one segment of 5, whose state has one level, and of two
CASES = [("flow_grpo", 5), ("nft", 5), ("branch_grpo", 5), ("flow_grpo", 9), ("branch_grpo", 9)]


@pytest.fixture(autouse=True)
def attention() -> Iterator[None]:
    with flex_on_cpu():
        yield


def settings(folder: Path, recipe: str, frames: int) -> dict[str, Any]:
    """A run whose prompts name a character's image and the frames that drive it."""
    MODULAR["wan_animate"]().save_pretrained(str(folder / "pipeline"), overwrite_modular_index=True)
    tree = runs.tree(folder / "pipeline", folder, RECIPES[recipe], lr=1e-3)
    rows = []
    for number, text in enumerate(("a red ball", "two small dogs")):
        files = [folder / f"{number}.{k}.png" for k in range(frames)]
        for k, file in enumerate(files):
            Image.new("RGB", (32, 32), (40 * number + 20 * k, 90, 200 - 20 * k)).save(file)
        names = [file.name for file in files]
        rows.append({"prompt": text, "image": names[0], "driving_video": names})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    Path(tree["prompts"]["train"]).write_text(lines)
    guidance = "none" if recipe == "nft" else 2.0  # it regresses the model's own velocity
    tree["model"] |= {"call": dict(MODULAR_CALLS["wan_animate"]), "guidance": guidance}
    tree["evaluate"] |= {"guidance": guidance}
    return tree


@pytest.mark.parametrize(("recipe", "frames"), CASES)
def test_a_run_begins_at_ratio_one_and_resumes_to_the_bit(
    recipe: str, frames: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = settings(tmp_path, recipe, frames)
    tree["train"]["iterations"] = 2
    runs.check_resumed_bits(tree, tmp_path)
    said = capsys.readouterr().out
    assert "ratio 1" in said or recipe == "nft"
    assert runs.lines(tmp_path / "whole")[-1]["grad_norm"] > 0
    check_plain(said, runs.weights(tmp_path / "whole"))


def check_plain(said: str, saved: dict[str, torch.Tensor]) -> None:
    """Plain diffusers has the run's adapters after the lines that the run prints."""
    lines = [line.strip() for line in said.splitlines() if line.startswith("  pipe")]
    names = {"torch": torch, "ModularPipeline": diffusers.ModularPipeline}
    exec("\n".join(lines[:3]), names)
    plain: Any = names["pipe"]
    loaded = {
        re.sub(r"\.default(_\d+)?\.", ".", name): value
        for name, value in plain.transformer.named_parameters()
        if ".lora_" in name
    }
    assert loaded.keys() == {name.removeprefix("transformer.") for name in saved}
    for name, value in saved.items():
        assert torch.equal(loaded[name.removeprefix("transformer.")], value)
