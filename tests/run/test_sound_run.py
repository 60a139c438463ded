"""A run of videos with sound: credit by part, its page, and samples from the command line."""

import wave

import diffusers
import pytest
import torch

import flowrl
from flowrl.errors import UserError
from tests.support import runs
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.calls_videos import VIDEO_SPECIALS
from tests.support.zoo.pipelines import tiny

pytestmark = pytest.mark.long

torch.set_num_threads(1)
QUIET = {
    "audio_guidance_scale": 1.0, "stg_scale": 0.0, "audio_stg_scale": 0.0,
    "modality_scale": 1.0, "audio_modality_scale": 1.0,
}  # fmt: skip
PROMPTS = ["a red cube", "two blue cat"]


def trained(folder, recipe, **settings):
    made = tiny(diffusers.LTX2Pipeline, SPECIALS | VIDEO_SPECIALS, SIZES)
    call = {**made.call, **QUIET}
    size = {name: call.pop(name) for name in ("height", "width")}
    tree = {
        "model": {"call": call, "guidance": {"sample": 1.0, "train": 1.0}, **size},
        "prompts": {"per_iteration": 2},
        "evaluate": {"every": 1, "samples": 2, "guidance": 1.0},
        "track": {"panel": False},
    } | settings
    return flowrl.train(
        made.pipe, rewards=["brightness", "loudness"], prompts=PROMPTS, held_out=PROMPTS,
        recipe=recipe, lora=4, iterations=1, lr=1e-3, settings=tree, folder=folder,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("nft", marks=pytest.mark.slow), "flow_grpo"])
def test_a_run_with_credit_by_part_begins_at_ratio_one(name, tmp_path, capsys):
    """Its page plays the sound, and its samples are files."""
    routes = {"video": ["brightness"], "audio": ["loudness"]}
    recipe = flowrl.recipe(name, steps=3, group=4, modalities=routes)
    run = trained(tmp_path / "run", recipe)
    (line,) = [each for each in run.metrics if each.get("iteration") == 1][-1:]
    assert line["grad_norm"] > 0
    assert "ratio 1" in capsys.readouterr().out
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("data:audio/wav;base64,") >= 2 and "media-src data:" in page
    if name == "flow_grpo":
        return
    out = tmp_path / "out"
    assert runs.flowrl("sample", tmp_path / "run", "a red cube", "--out", out) == 0
    with wave.open(str(out / "000.wav")) as file:
        assert file.getframerate() == 24_000 and file.getnchannels() == 2 and file.getnframes() > 10
    assert (out / "000.spectrogram.png").is_file() and (out / "000.gif").is_file()


@pytest.mark.slow
def test_modalities_that_do_not_fit_are_refused_early(tmp_path):
    with pytest.raises(UserError, match="brightness trains no part"):
        trained(tmp_path / "a", {"name": "nft", "modalities": {"audio": ["loudness"]}})
    routes = {"picture": ["brightness"], "audio": ["loudness"]}
    with pytest.raises(UserError, match="the parts video, audio, and no picture"):
        trained(tmp_path / "b", {"name": "nft", "modalities": routes})
