"""The world's laws; the shipped pipeline loads by diffusers alone; pre-training runs and repeats.

What the numbers are based on: see `test_base_accuracy_leaves_room_to_learn`.
"""

import importlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file
from torch import nn

from flowrl.demo import world
from flowrl.demo.world import PlacedObject
from rewards.catalogue.shapes import BACKGROUND, COLOURS, detect, is_exact
from tests.support import demo_folders

FOLDER = Path("flowrl/demo/shapes-sd3")


@pytest.fixture(scope="module")
def pipe():
    return demo_folders.loaded(FOLDER)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend("scripts")
    return importlib.import_module("pretrain_demo")


def paint(pipe, prompts, seed=0, length=8, **call):
    return pipe(
        prompts,
        num_inference_steps=10,
        guidance_scale=1.0,
        max_sequence_length=length,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
        **call,
    ).images


def accuracy(images, prompts):
    pairs = zip(detect(images), prompts, strict=True)
    return sum(is_exact(found, world.wanted_shapes(prompt)) for found, prompt in pairs) / len(
        prompts
    )


def test_the_folder_is_small_and_in_half_precision():
    demo_folders.check_small_and_halved(FOLDER, 12e6, 5)


def test_it_loads_without_any_argument_and_in_one_dtype(pipe):
    assert type(pipe) is StableDiffusion3Pipeline
    modules = {n: m for n, m in pipe.components.items() if isinstance(m, nn.Module)}
    assert {p.dtype for m in modules.values() for p in m.parameters()} == {torch.float32}
    assert (pipe.default_sample_size, pipe.vae_scale_factor) == (8, 4)
    assert (pipe.vae.config.scaling_factor, pipe.vae.config.shift_factor) == (1, 0)


def test_a_plain_call_paints(pipe):
    """No argument but the steps and the guidance: 32 x 32 pixels, and mostly the right thing."""
    prompts = ["a red circle", "a blue square", "a green triangle", "a black circle"]
    torch.manual_seed(0)
    images = pipe(prompts, num_inference_steps=10, guidance_scale=1.0).images
    assert images[0].size == (32, 32)
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    assert accuracy(pixels.permute(0, 3, 1, 2) / 255, prompts) >= 0.5


@pytest.mark.slow
def test_base_accuracy_leaves_room_to_learn(pipe):
    """Held-out prompts, 10 steps, no guidance; the standard error of 130 samples is 4 points."""
    prompts = world.prompts_of("held_out")
    assert 0.60 <= accuracy(paint(pipe, prompts), prompts) <= 0.90


@pytest.mark.slow
def test_padding_hardly_matters(pipe):
    """SD3's pipeline appends `max_sequence_length` zero tokens; attention does not mask them."""
    prompts = world.prompts_of("held_out")[:12]
    short, long = paint(pipe, prompts, length=1), paint(pipe, prompts, length=256)
    assert (short - long).abs().mean() < 0.03
    other = paint(pipe, prompts, seed=1, length=1)
    assert (short - other).abs().mean() > 0.05  # what "different" means


def test_the_silent_third_encoder_is_as_good_as_none(pipe):
    bare = StableDiffusion3Pipeline(
        **{**pipe.components, "text_encoder_3": None, "tokenizer_3": None}
    )
    bare.set_progress_bar_config(disable=True)
    prompts = ["a red circle left of a blue square", "two green squares"]
    torch.testing.assert_close(paint(bare, prompts), paint(pipe, prompts), rtol=0, atol=0)


def test_the_tokenizer_knows_every_word(pipe):
    for prompt in world.all_prompts():
        ids = pipe.tokenizer(prompt).input_ids
        assert pipe.tokenizer.unk_token_id not in ids
        assert ids[0] == pipe.tokenizer.bos_token_id and ids[-1] == pipe.tokenizer.eos_token_id
        assert len(ids) == len(prompt.split()) + 2 <= pipe.tokenizer.model_max_length
    assert pipe.tokenizer("a cat").input_ids[2] == pipe.tokenizer.unk_token_id


def test_pictures_survive_the_autoencoder(pipe):
    prompts = world.prompts_of("held_out")
    images = world.render_images(prompts, random.Random(0))
    with torch.no_grad():
        latents = pipe.vae.encode(images * 2 - 1).latents
        again = pipe.vae.decode(latents).sample / 2 + 0.5
    assert accuracy(again, prompts) >= 0.94
    assert latents.mean((0, 2, 3)).abs().max() < 0.15
    assert (latents.std((0, 2, 3)) - 1).abs().max() < 0.15


@pytest.mark.parametrize("count", [1, 5, 40])
def test_one_biased_token_is_many_equal_ones(pipe, script, count):
    """What pre-training computes is what the pipeline computes with `count` zero tokens."""
    prompts = ["a red circle", "two blue squares"]
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.3, 0.9])

    def velocity(length, **extra):
        text, _, pooled, _ = pipe.encode_prompt(
            prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=length
        )
        timestep = 1000 * sigma
        return pipe.transformer(x, text, pooled, timestep, return_dict=False, **extra)[0]

    own = pipe.transformer.attn_processors
    bias = torch.zeros(2, 1, 1, 16 + 10 + 1)
    bias[..., -1] = torch.tensor(float(count)).log()
    with torch.no_grad():
        many = velocity(count)
        pipe.transformer.set_attn_processor(script.BiasedAttention())
        one = velocity(1, joint_attention_kwargs={"attention_mask": bias})
        pipe.transformer.set_attn_processor(own)
    torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-4)


def test_padding_counts_cover_none_to_all(script):
    torch.manual_seed(0)
    bias = script.padding_bias(4000, 27)
    assert bias.shape == (4000, 1, 1, 27) and (bias[..., :-1] == 0).all()
    count = bias[:, 0, 0, -1].exp().round()
    assert count.min() == 0 and 200 < count.max() <= 256
    assert (count == 0).float().mean() == pytest.approx(0.125, abs=0.02)  # log 2 / log 257


@pytest.mark.slow
def test_quick_pretraining_runs_and_repeats(script, tmp_path):
    for name in ("a", "b"):
        script.main(script.PretrainArguments(tmp_path / name, seed=3, quick=True, threads=1))
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    for file in (tmp_path / "a").rglob("*.safetensors"):
        first, second = (
            load_file(file),
            load_file(tmp_path / "b" / file.relative_to(tmp_path / "a")),
        )
        assert all(torch.equal(first[key], second[key]) for key in first)
    shipped = {file.relative_to(FOLDER) for file in FOLDER.rglob("*") if file.is_file()}
    made = {file.relative_to(tmp_path / "a") for file in (tmp_path / "a").rglob("*.*")}
    assert {file for file in made if (tmp_path / "a" / file).is_file()} == shipped


@pytest.mark.slow
def test_training_moves_all_parts_and_the_average_is_kept(script, tmp_path):
    """One flow step with a nearly frozen average: weights come back close to their start."""
    torch.manual_seed(0)
    pipe = script.make_pipeline()
    work = script.Work.quick()
    parts = script.flow_parts(pipe)
    before = [p.detach().clone() for part in parts for p in part.parameters()]
    prompts = world.prompts_of("train")[: work.pictures]
    saved = script.Saved(tmp_path / "saved", "quick")
    script.train_flow(pipe, torch.randn(len(prompts), 4, 8, 8), prompts, work, saved)
    assert not saved.path.exists()
    moved = [
        not torch.equal(a, b)
        for a, b in zip(
            before, [p.detach() for part in parts for p in part.parameters()], strict=True
        )
    ]
    assert sum(moved) > 0.5 * len(moved)
    assert all(p.isfinite().all() for part in parts for p in part.parameters())


def test_scenes_are_what_the_prompt_says():
    rng = random.Random(4)
    for prompt in world.draw_prompts(300, rng):
        scene = world.arrange(world.wanted_shapes(prompt), rng)
        wanted = world.wanted_shapes(prompt)
        assert tuple((t.colour, t.shape) for t in scene) == wanted.things
        for i, t in enumerate(scene):
            assert t.radius <= t.x <= world.SIZE - t.radius
            assert t.radius <= t.y <= world.SIZE - t.radius
            for u in scene[:i]:
                assert max(abs(t.x - u.x), abs(t.y - u.y)) > t.radius + u.radius


def test_rendering_does_not_depend_on_the_batch():
    rng = random.Random(4)
    scenes = [world.arrange(world.wanted_shapes(p), rng) for p in world.draw_prompts(30, rng)]
    torch.testing.assert_close(
        world.render(scenes), torch.cat([world.render([scene]) for scene in scenes])
    )
    disc = world.render([[PlacedObject("black", "circle", 16.0, 16.0, 8.0)]])
    background = torch.tensor(BACKGROUND)[:, None, None] / 255
    ink = (background - disc[0]) / (
        background - torch.tensor(COLOURS["black"])[:, None, None] / 255
    )
    assert ink.sum() / 3 == pytest.approx(torch.pi * 64, rel=0.01)  # the area of a disc


def test_splits_cover_all_prompts_once_and_the_files_are_theirs():
    files = {}
    for name in ("train", "held_out", "test"):
        lines = Path(f"configs/prompts/shapes_{name}.jsonl").read_text().splitlines()
        files[name] = [json.loads(line)["prompt"] for line in lines]
        assert set(files[name]) == set(world.prompts_of(name))
        assert {world.wanted_shapes(prompt).kind for prompt in files[name]} == set(
            world.PROMPT_KINDS
        )
    together = [prompt for prompts in files.values() for prompt in prompts]
    assert sorted(together) == sorted(world.all_prompts())
    assert 100 <= len(files["held_out"]) <= 150 and 100 <= len(files["test"]) <= 150


def test_drawn_prompts_are_of_their_split_in_the_stated_shares():
    prompts = world.draw_prompts(2000, random.Random(0))
    assert {world.split(prompt) for prompt in prompts} == {"train"}
    for kind, share in zip(world.PROMPT_KINDS, world.KIND_SHARES, strict=True):
        part = sum(world.wanted_shapes(prompt).kind == kind for prompt in prompts) / 2000
        assert part == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("name", ["shapes-sd15", "edits-kontext"])
def test_the_oldest_transformers_finds_all_weights_of_clips_text_model(name):
    """It asks for `text_model.`, newer ones take both: without it, they would be random."""
    file = FOLDER.with_name(name) / "text_encoder" / "model.safetensors"
    assert all(key.startswith("text_model.") for key in load_file(file))
