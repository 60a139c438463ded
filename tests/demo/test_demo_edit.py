"""The editing demo: its folder is plain diffusers', what a run edits is what diffusers edits."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import FluxKontextPipeline
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from flowrl.demo import edit_world
from flowrl.demo.world import render
from flowrl.media.pictures import to_image
from flowrl.pages.records import read_evaluations
from flowrl.paths import PROJECT
from flowrl.settings.read import dump, read_run
from rewards.catalogue.edit_shapes import grade_edit
from rewards.catalogue.shapes import detect
from tests.support import demo_folders, runs

torch.set_num_threads(1)
FOLDER = PROJECT / "flowrl" / "demo" / "edits-kontext"
CONFIG = PROJECT / "configs" / "demo_edit.yaml"
PLAIN = """
import json, sys
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
base, given, sources, out, prompts = sys.argv[1:]
pipe = DiffusionPipeline.from_pretrained(base)
prompts, latents = json.loads(prompts), load_file(given)["latents"]
images = pipe(
    [Image.open(f"{sources}/{i}.png") for i in range(len(prompts))], prompts, latents=latents,
    num_inference_steps=4, height=32, width=32, max_area=1024, _auto_resize=False,
    max_sequence_length=8, output_type="pt",
).images
assert not any(name.startswith(("flowrl", "samplers", "rewards")) for name in sys.modules)
save_file({"images": images.contiguous()}, out)
"""
CALL = {"height": 32, "width": 32, "max_area": 1024, "_auto_resize": False}


@pytest.fixture(scope="module")
def pipe():
    return demo_folders.loaded(FOLDER)


def edit(pipe, sources, prompts, steps=10, **call):
    return pipe(
        [to_image(source) for source in sources],
        prompts,
        num_inference_steps=steps,
        max_sequence_length=8,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
        **CALL,
        **call,
    ).images


def test_the_folder_is_small_and_in_half_precision():
    demo_folders.check_small_and_halved(FOLDER, 3.5e6, 4)


def test_it_loads_without_any_argument_and_in_one_dtype(pipe):
    assert type(pipe) is FluxKontextPipeline
    modules = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    assert {p.dtype for m in modules.values() for p in m.parameters()} == {torch.float32}


@pytest.mark.slow
def test_base_accuracy_leaves_room_to_learn(pipe):
    """Held-out instructions, 10 steps; the standard error of 108 samples is 5 points."""
    rng, asked = random.Random(0), edit_world.instructions_of("held_out") * 4
    sources = render([edit_world.draw_pair(text, rng).source for text in asked])
    results = edit(pipe, sources, asked)
    found = zip(detect(sources), detect(results), asked, strict=True)
    right = [grade_edit(a, b, edit_world.wanted_edit(text)) == 1 for a, b, text in found]
    assert 0.25 <= sum(right) / len(right) <= 0.75


def test_an_edit_depends_on_its_instruction_and_on_its_source(pipe):
    """The same noise: another colour, kind or source changes the image."""
    rng = random.Random(1)
    pairs = [edit_world.draw_pair("make the red circle blue", rng) for _ in range(2)]
    source, other = render([pair.source for pair in pairs])
    prompts = ["make the red circle blue", "make the red circle green", "remove the red circle"]
    noise = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0))
    results = edit(
        pipe,
        [source, source, source, other],
        [*prompts, prompts[0]],
        latents=noise.expand(4, -1, -1).clone(),
    )
    assert all((results[0] - another).abs().mean() > 0.005 for another in results[1:])


@pytest.mark.slow
def test_a_given_image_is_edited_from_the_command_line(tmp_path, capsys):
    words = ["sample", "--model", FOLDER, "make the red circle blue", "--count", "1", "--steps"]
    words += ["2", "--model.height", "32", "--model.width", "32"]
    call = "{max_area: 1024, _auto_resize: false, max_sequence_length: 8}"
    words += ["--model.call", call, "--image"]
    sheet = PROJECT / "configs" / "prompts" / "edits.png"
    for name, at in (("a", 0), ("b", 32)):
        piece = f"{sheet}#xywh={at},0,32,32"
        assert runs.flowrl(*words, piece, "--out", tmp_path / name) == 0
    assert (tmp_path / "a" / "000.png").read_bytes() != (tmp_path / "b" / "000.png").read_bytes()
    assert runs.flowrl(*words, "gone.png", "--out", tmp_path / "c") == 2
    assert "gone.png: no such file" in capsys.readouterr().err


def test_a_pipeline_without_images_refuses_one(tmp_path, capsys):
    sheet = PROJECT / "configs" / "prompts" / "edits.png"
    words = ["sample", "--model", PROJECT / "flowrl" / "demo" / "shapes-sd3", "a red circle"]
    assert runs.flowrl(*words, "--image", sheet, "--out", tmp_path / "d") == 2
    assert "the call of StableDiffusion3Pipeline takes no image" in capsys.readouterr().err


def cut_down(folder: Path, iterations: int) -> Path:
    """The demo's configuration in a few seconds."""
    tree = dump(read_run(CONFIG))
    tree["recipe"] |= {"group": 3, "levels_per_sample": 1, "steps": 3}
    tree["prompts"]["per_iteration"] = 2
    tree["train"] |= {"iterations": iterations, "updates": 1}
    tree["evaluate"] |= {"every": iterations, "steps": 2, "samples": 4}
    tree["checkpoint"]["every"] = iterations
    return runs.write(tree, folder)


@pytest.mark.slow
def test_a_run_edits_trains_and_ends(tmp_path, capsys):
    config, folder = cut_down(tmp_path, 1), tmp_path / "run"
    assert runs.flowrl("train", config, "--folder", folder) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and lines[-1]["count/training"] > 0
    assert (folder / "pipeline" / "model_index.json").is_file()
    (source,) = read_evaluations(folder)[0].same[0].given
    assert (source.name, source.width, source.height) == ("image", 32, 32)


@pytest.mark.slow
def test_plain_diffusers_edits_the_last_evaluation(tmp_path):
    tree = yaml.safe_load(cut_down(tmp_path, 2).read_text())
    tree["evaluate"] |= {"steps": 4, "samples": 6, "per_prompt": 1}
    session = runs.opened(tree, tmp_path)
    result = demo_folders.evaluated_after_training(session, 4, tmp_path)
    for i, row in enumerate(result.samples.meta):
        sheet, _, box = row["image"].partition("#xywh=")
        x, y, width, height = map(int, box.split(","))
        Image.open(sheet).crop((x, y, x + width, y + height)).save(tmp_path / f"{i}.png")
    words = [tmp_path / "weights", tmp_path / "latents.safetensors", tmp_path]
    words += [tmp_path / "out.safetensors", json.dumps(list(result.samples.prompts))]
    command = [sys.executable, "-c", PLAIN, *map(str, words)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    plain = load_file(tmp_path / "out.safetensors")["images"]
    assert len(plain) == 6
    torch.testing.assert_close(plain, result.samples.media, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_demo_learns_its_edits(tmp_path):
    """As a user runs it: held-out strict accuracy rises by 0.10 or more."""
    folder = tmp_path / "run"
    words = ["train", str(CONFIG), "--folder", str(folder)]
    command = [sys.executable, "-m", "flowrl", *words]
    subprocess.run(command, check=True, cwd=PROJECT, capture_output=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    key = "held_out/edit_shapes.strict"
    assert lines[-1][key] - lines[0][key] >= 0.10
