"""Runs of pipelines of sound alone: recipes, commands, pages, votes, resumes, processes."""

import json
import math
import wave
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from flowrl.errors import UserError
from flowrl.evaluation.folders import find_items
from flowrl.evaluation.measure import Gallery
from flowrl.models.diffusers.saving import save_pipeline
from flowrl.pages.run_folder import RunFolder
from flowrl.prompts.row_sizes import RowSize, check_seconds
from flowrl.run.watch.start_check import check_start
from flowrl.settings.read import run_from
from flowrl.votes.collect import SampleCopies
from flowrl.votes.plan import PlannedSample
from flowrl.votes.server import _part
from rewards.perception.sound import tones
from rewards.types import Samples
from tests.support import runs
from tests.support.process_runs import Job, check_two_as_one
from tests.support.zoo.calls import SIZES, SPECIALS
from tests.support.zoo.pipelines import tiny
from tests.support.zoo.sounds import SOUND_SPECIALS

torch.set_num_threads(1)
RECIPES: dict[str, dict[str, Any]] = {
    "flow_grpo": {"name": "flow_grpo", "steps": 3, "group": 4},
    "nft": {"name": "nft", "steps": 3, "group": 4},
}


def settings(folder: Path, recipe: str, name: str = "StableAudioPipeline") -> dict[str, Any]:
    """A run of a tiny pipeline of sound, saved in the folder."""
    made = tiny(getattr(diffusers, name), SPECIALS | SOUND_SPECIALS, SIZES)
    save_pipeline(made.pipe, folder / "pipeline")
    tree = runs.tree(folder / "pipeline", folder, RECIPES[recipe])
    tree["model"] |= {"call": made.call, "guidance": {"sample": 1.0, "train": 1.0}}
    tree["rewards"] = [{"name": "loudness", "target": -20.0}]
    tree["evaluate"] |= {"guidance": 1.0}
    return tree


def test_a_reward_of_images_is_refused_before_weights_load(tmp_path: Path) -> None:
    """By what the reward's file says and what the pipeline's class makes: `check_start` reads no
    weights."""
    tree = settings(tmp_path, "nft")
    tree["rewards"] = [{"name": "brightness"}]
    with pytest.raises(UserError, match=r"rewards: brightness: the reward 'brightness' scores "
                       r"images or videos; it was given sound: take clap, loudness"):  # fmt: skip
        check_start(run_from(tree, "run"))
    tree |= {"rewards": [{"name": "loudness"}], "held_out_rewards": [{"name": "jpeg"}]}
    with pytest.raises(UserError, match="held_out_rewards: jpeg"):
        check_start(run_from(tree, "run"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["StableAudioPipeline", "LongCatAudioDiTPipeline"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_begins_at_ratio_one_and_resumes_to_the_bit(
    recipe: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.check_resumed_bits(settings(tmp_path, recipe, name), tmp_path)
    out = capsys.readouterr().out
    assert "ratio 1" in out and "reward loudness" in out
    lines = runs.lines(tmp_path / "whole")
    assert lines[-1]["grad_norm"] > 0 and lines[-1]["sound/level"] > 0
    page = (tmp_path / "whole" / "report.html").read_text()
    assert page.count("data:audio/wav;base64,") >= 2 and "Level of the sound" in page
    folder = RunFolder.read(tmp_path / "whole")
    assert "sound/level" not in folder.held_out_scores and "loudness" in folder.held_out_scores


@pytest.mark.slow
def test_commands_take_a_run_of_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """sample writes WAV files, which score reads; evaluate, report and export work as ever."""
    config = runs.write(settings(tmp_path, "nft"), tmp_path)
    run, out = tmp_path / "run", tmp_path / "out"
    assert runs.flowrl("train", config, "--folder", run, "--train.iterations", "1") == 0
    assert runs.flowrl("sample", run, "a red ball", "--count", "2", "--out", out) == 0
    with wave.open(str(out / "000.wav")) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes()) == (800, 2, 100)
    for made in ("000.png", "000.spectrogram.png", "grid.png"):
        assert (out / made).is_file()
    rows = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == ["000.wav", "001.wav"]
    capsys.readouterr()
    assert runs.flowrl("score", out, "--rewards", "loudness", "--out", tmp_path / "scores") == 0
    assert "loudness" in capsys.readouterr().out
    assert runs.flowrl("score", out, "--rewards", "brightness", "--out", tmp_path / "none") == 2
    assert "scores images or videos; it was given sound" in capsys.readouterr().err
    assert runs.flowrl("evaluate", run) == 0
    assert "diversity within a prompt" in capsys.readouterr().out
    assert runs.flowrl("report", run) == 0 and runs.flowrl("plan", config) == 0
    assert runs.flowrl("export", run, "--out", tmp_path / "card") == 0
    assert "text-to-audio" in (tmp_path / "card" / "README.md").read_text()


def test_votes_hear_a_sound_and_see_its_drawing(tmp_path: Path) -> None:
    """Sounds of a model, drawn as its pages do, and of a folder; the file that is voted on is the
    WAV, so that a reward of images is never fitted to drawings."""
    audio = tones((0.5, 0.1), 8000, 0.25)
    drawn = Samples(torch.zeros(2, 3, 8, 16), ["a tone"] * 2, torch.zeros(2).long(), (), audio)
    copies = SampleCopies(tmp_path)
    assert copies.add_all(drawn, "a model") == [0, 1]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.wav").write_bytes((tmp_path / "samples" / "00000.wav").read_bytes())
    items = find_items(tmp_path / "in", None, "names").items
    copies.add(Gallery(items).samples([0]).media[0], "x", "a file")
    for sample in copies.planned:
        assert isinstance(sample, PlannedSample) and sample.kind == "sound"
        assert sample.seconds == pytest.approx(0.25)
        heard, seen = (_part(tmp_path, sample, part) for part in ("sound", "0"))
        assert heard is not None and heard.kind == "audio/wav" and heard.content[:4] == b"RIFF"
        assert seen is not None and seen.content[:4] == b"\x89PNG"
        assert _part(tmp_path, sample, "1") is None


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    job: Job = {"settings": settings(tmp_path, "flow_grpo"), "iterations": 2}
    check_two_as_one({"sound": job}, tmp_path, apart_below=1e-4)


@pytest.mark.slow
def test_rows_have_seconds_of_their_own(tmp_path: Path) -> None:
    """A column named as the pipeline's argument: latents and sounds of several lengths in one
    iteration, on its page, in samples, and after a resume."""
    tree = settings(tmp_path, "flow_grpo", "StableAudio3Pipeline")
    tree = runs.sized(tree, [{"duration": x} for x in (0.125, 0.0625, 0.125, 0.25)])
    for side in ("height", "width"):
        del tree["model"][side]
    runs.check_resumed_bits(tree, tmp_path)
    page = (tmp_path / "whole" / "report.html").read_text()
    assert page.count("data:audio/wav;base64,") >= 2
    out = tmp_path / "out"
    words = ("a red ball", "a blue cube on the table")
    assert runs.flowrl("sample", tmp_path / "whole", *words, "--count", "1", "--out", out) == 0
    frames = []
    for file in sorted(out.glob("*.wav")):
        with wave.open(str(file)) as opened:
            frames.append(opened.getnframes())
    assert frames == [100, 50]


def test_seconds_that_are_no_length_are_refused() -> None:
    assert RowSize.of({"duration": 2}).given == {"duration": 2.0}
    assert str(RowSize.of({"audio_end_in_s": 2.5})) == "2.5 s"
    for value in (0, -1.0, math.inf, "long", True):
        rows = [{"duration": value}]
        assert RowSize.of(rows[0]) == RowSize(), "a column of an image's prompts may be called so"
        check_seconds(rows, {"audio_duration"}.__contains__)
        with pytest.raises(UserError, match=r"duration: .* is not a number of seconds"):
            check_seconds(rows, {"duration"}.__contains__)
    check_seconds([{"duration": value} for value in (None, "", math.nan, 3)], lambda _: True)
