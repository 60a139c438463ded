"""The video demo: its folder is plain diffusers', what a run films is what diffusers films."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file
from torch import nn

from flowrl.demo import moving_world
from flowrl.paths import PROJECT
from flowrl.session.session import Session, open_accelerator, open_session
from flowrl.settings.read import dump, read_run, run_from
from rewards.catalogue.moving_shapes import grade_motion, watch
from tests.support import demo_folders

torch.set_num_threads(1)
FOLDER = PROJECT / "flowrl" / "demo" / "moving-wan"
PLAIN = """
import json, sys
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
base, given, out = sys.argv[1:4]
pipe = DiffusionPipeline.from_pretrained(base)
films = pipe(
    json.loads(sys.argv[4]), latents=load_file(given)["latents"], num_inference_steps=4,
    height=32, width=32, num_frames=5, max_sequence_length=12, guidance_scale=1.0, output_type="pt",
).frames
assert not any(name.startswith(("flowrl", "samplers", "rewards")) for name in sys.modules)
save_file({"films": films.contiguous()}, out)
"""


@pytest.fixture(scope="module")
def pipe():
    return demo_folders.loaded(FOLDER)


def film(pipe, prompts, steps=10, **call):
    size = {"height": 32, "width": 32, "num_frames": 5}
    return pipe(
        prompts,
        num_inference_steps=steps,
        guidance_scale=1.0,
        max_sequence_length=12,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        **size,
        **call,
    ).frames


def accuracy(films, prompts):
    pairs = zip(watch(films, 0.80, 0.75), prompts, strict=True)
    return sum(grade_motion(found, moving_world.wanted_actors(p)) == 1 for found, p in pairs) / len(
        prompts
    )


def opened(folder: Path) -> Session:
    """The demo's configuration, cut down to a few seconds."""
    tree = dump(read_run(PROJECT / "configs" / "demo_video.yaml"))
    tree["prompts"]["per_iteration"] = 2
    tree["recipe"] |= {"group": 4, "levels_per_sample": 2}
    tree["evaluate"] |= {"samples": 4, "steps": 4, "per_prompt": 2}
    tree["model"]["device"] = "cpu"
    run = run_from(tree, "test")
    return open_session(run, folder, open_accelerator(run, folder))


def test_the_folder_is_small_and_in_half_precision():
    demo_folders.check_small_and_halved(FOLDER, 4e6, 3)


def test_it_loads_without_any_argument_and_in_one_dtype(pipe):
    assert type(pipe) is WanPipeline
    modules = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    assert {p.dtype for m in modules.values() for p in m.parameters()} == {torch.float32}
    assert (pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial) == (2, 8)


@pytest.mark.slow
def test_base_accuracy_leaves_room_to_learn(pipe):
    """Held-out prompts, 10 steps, no guidance; the standard error of 136 samples is 4 points."""
    prompts = moving_world.moving_prompts_of("held_out")
    assert 0.58 <= accuracy(film(pipe, prompts), prompts) <= 0.86


def test_films_survive_the_autoencoder(pipe):
    prompts = moving_world.moving_prompts_of("held_out")[:64]
    films = moving_world.render_videos(prompts, random.Random(0)).transpose(1, 2)
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1)
        for v in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    with torch.no_grad():
        posterior = pipe.vae.encode(films * 2 - 1).latent_dist
        again = pipe.vae.decode(posterior.mode()).sample / 2 + 0.5
    latents = (posterior.mode() - mean) / std
    assert accuracy(again.transpose(1, 2), prompts) >= 0.70  # 0.84 of 256; 4 points an error
    assert latents.mean((0, 2, 3, 4)).abs().max() < 0.2
    assert (latents.std((0, 2, 3, 4)) - 1).abs().max() < 0.2
    torch.testing.assert_close(
        posterior.std, torch.full_like(posterior.std, 0.1), rtol=1e-3, atol=0
    )


def test_the_tokenizer_knows_every_word(pipe):
    for prompt in moving_world.all_moving_prompts():
        ids = pipe.tokenizer(prompt).input_ids
        assert pipe.tokenizer.unk_token_id not in ids
        assert ids[-1] == pipe.tokenizer.eos_token_id
        assert len(ids) == len(prompt.split()) + 1 <= pipe.tokenizer.model_max_length == 12
    assert pipe.tokenizer("a cat").input_ids[1] == pipe.tokenizer.unk_token_id


def test_a_film_depends_on_its_words(pipe):
    """The same noise: another colour, shape or motion changes the film, a capital does not."""
    prompts = ["a red circle moving right", "a blue circle moving right"]
    prompts += ["a red square moving right", "a red circle moving down"]
    latents = torch.randn(1, 8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    films = film(pipe, prompts, latents=latents.expand(4, -1, -1, -1, -1).clone())
    changes = [(films[0] - other).abs().mean() for other in films[1:]]
    assert all(change > 0.004 for change in changes), changes  # a shape: its corners alone


def test_a_film_depends_on_which_object_a_motion_belongs_to(pipe):
    """Two prompts of the same words, with each other's motions."""
    prompts = ["a red circle moving right and a blue square moving left"]
    prompts += ["a red circle moving left and a blue square moving right"]
    latents = torch.randn(1, 8, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    films = film(pipe, prompts, latents=latents.expand(2, -1, -1, -1, -1).clone())
    assert (films[0] - films[1]).abs().mean() > 0.02


@pytest.mark.slow
def test_plain_diffusers_films_the_last_evaluation(tmp_path):
    session = opened(tmp_path)
    result = demo_folders.evaluated_after_training(session, 4, tmp_path)
    words = [tmp_path / "weights", tmp_path / "latents.safetensors", tmp_path / "films.safetensors"]
    words.append(json.dumps(list(result.samples.prompts)))
    command = [sys.executable, "-c", PLAIN, *map(str, words)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    plain = load_file(tmp_path / "films.safetensors")["films"]
    assert plain.shape == (4, 5, 3, 32, 32)
    torch.testing.assert_close(plain, result.samples.media, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_demo_learns_its_films(tmp_path):
    """As a user runs it: held-out strict accuracy rises by 0.05 or more, and films lie there."""
    folder = tmp_path / "run"
    words = ["train", str(PROJECT / "configs" / "demo_video.yaml"), "--folder", str(folder)]
    command = [sys.executable, "-m", "flowrl", *words]
    subprocess.run(command, check=True, cwd=PROJECT, capture_output=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    key = "held_out/moving_shapes.strict"
    assert lines[-1][key] - lines[0][key] >= 0.05
    assert lines[-1]["held_out/image/diversity"] > 0.7 * lines[0]["held_out/image/diversity"]
    words = ["sample", str(folder), "a red circle moving right", "--out", str(tmp_path / "films")]
    subprocess.run([sys.executable, "-m", "flowrl", *words], check=True, cwd=PROJECT)
    assert (tmp_path / "films" / "000.gif").is_file() and (
        tmp_path / "films" / "grid.gif"
    ).is_file()
