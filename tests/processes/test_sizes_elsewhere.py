"""Prompts of several sizes, inpainting, and videos with sound: by a worker and by shared weights,
beside the same run in one process."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
from PIL import Image

from flowrl.models.diffusers.saving import save_pipeline
from tests.processes.test_processes import NEAR
from tests.support import runs, tiny_pipelines
from tests.support.process_runs import FSDP2, Job, alone, apart, together, told
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.calls_videos import VIDEO_SPECIALS
from tests.support.zoo.pipelines import tiny
from tests.support.zoo.sounds import SOUND_SPECIALS

pytestmark = pytest.mark.slow

# two sizes for the first of two processes, and one for the second
ROWS = [{"height": 16, "width": 12}, {}, {"height": 12}, {"width": 12, "height": 12}]


def sizes_by_row(folder: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    tiny_pipelines.flux().save_pretrained(folder / "pipeline")
    tree = runs.sized(runs.tree(folder / "pipeline", folder, recipe, lr=1e-3), ROWS)
    tree["prompts"]["per_iteration"] = 3
    return tree


def inpainting(folder: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    """The noised image is put back outside the mask after each step."""
    made = tiny(diffusers.StableDiffusion3InpaintPipeline, SPECIALS | VIDEO_SPECIALS, SIZES)
    save_pipeline(made.pipe, folder / "pipeline")
    tree = runs.tree(folder / "pipeline", folder, recipe, lr=1e-3)
    file = Path(tree["prompts"]["train"])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    mask = Image.new("L", (16, 16), 0)
    mask.paste(255, (0, 0, 16, 8))
    mask.save(folder / "mask.png")
    for number, row in enumerate(rows):
        Image.new("RGB", (16, 16), (60 * number, 90, 120)).save(folder / f"{number}.png")
        row |= {"image": f"{number}.png", "mask_image": "mask.png"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree["model"] |= {"call": made.call | {"strength": 1.0}}
    return tree


def video_with_sound(folder: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    made = tiny(diffusers.LTX2Pipeline, SPECIALS | VIDEO_SPECIALS, SIZES)
    save_pipeline(made.pipe, folder / "pipeline")
    tree = runs.tree(folder / "pipeline", folder, recipe, lr=1e-3)
    tree["model"] |= {"call": made.call, "guidance": 3.0}
    tree["rewards"] = [{"name": "brightness"}, {"name": "loudness"}]
    return tree


def sound(folder: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    made = tiny(diffusers.StableAudioPipeline, SPECIALS | SOUND_SPECIALS, SIZES)
    save_pipeline(made.pipe, folder / "pipeline")
    tree = runs.tree(folder / "pipeline", folder, recipe, lr=1e-3)
    tree["model"] |= {"call": made.call, "guidance": 3.0}
    tree["rewards"] = [{"name": "loudness", "target": -20.0}]
    return tree


CASES = {
    "sizes by row": sizes_by_row,
    "inpainting": inpainting,
    "video with sound": video_with_sound,
    "sound": sound,
}
DTYPES = {"sound": "float32"}  # the levels of EDM's scheduler are, whatever the network's dtype is
RECIPE = {"name": "flow_grpo", "steps": 3, "group": 2, "clip": 0.2}


@pytest.mark.parametrize("case", CASES)
def test_a_worker_changes_no_bit(case: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    tree = CASES[case](tmp_path, RECIPE)
    tree["train"]["iterations"] = 2
    tree["evaluate"] |= {"steps": 2, "samples": 2, "per_prompt": 1}
    config = runs.write(tree, tmp_path)
    assert runs.flowrl("train", config, "--folder", tmp_path / "here") == 0
    more = ("--workers.sampling", "1")
    assert runs.flowrl("train", config, "--folder", tmp_path / "there", *more) == 0
    for name in ("policies.safetensors", "optimizer.pt"):
        ends = [tmp_path / run / "checkpoints" / "000002" / name for run in ("here", "there")]
        assert ends[0].read_bytes() == ends[1].read_bytes()
    assert runs.lines(tmp_path / "here")[-1]["grad_norm"] > 0


def test_shared_weights_end_as_whole_ones_do(tmp_path: Path) -> None:
    jobs: dict[str, Job] = {}
    for case in CASES:
        folder = tmp_path / case.replace(" ", "_")
        folder.mkdir()
        tree = CASES[case](folder, RECIPE)
        tree["model"] |= {"lora": None, "dtype": DTYPES.get(case, "float64")}
        tree["train"]["rows_per_call"] = 2
        tree["prompts"]["per_iteration"] = 3
        jobs[case] = {"settings": tree, "iterations": 1}
    both = together(FSDP2, jobs, tmp_path / "both")
    for case, job in jobs.items():
        one = alone(job, tmp_path / f"{case}_alone")
        shared = told(tmp_path / "both", case)
        assert shared["processes"].startswith("2 processes, FSDP2: this one holds 0."), case
        assert shared["norms"][0] > 0 and shared["moved"] > 1e-5, case
        assert apart(one, both[case]) < NEAR[DTYPES.get(case, "float64")], case
