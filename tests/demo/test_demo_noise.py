"""The noise-prediction demo: its folder, its script, and how flowrl trains a model of its class."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import DDIMScheduler, StableDiffusionPipeline

from flowrl.demo import world
from flowrl.iteration import ratio_check
from flowrl.paths import PROJECT
from flowrl.settings.read import dump, read_run
from rewards.catalogue.shapes import detect, is_exact
from samplers.adapt import flow_velocity, level
from tests.support import demo_folders, runs
from tests.support.iterations import collect

torch.set_num_threads(1)
FOLDER = PROJECT / "flowrl" / "demo" / "shapes-sd15"
CONFIG = PROJECT / "configs" / "demo_noise.yaml"
TABLE = yaml.safe_load((PROJECT / "configs" / "compare" / "noise.yaml").read_text())


@pytest.fixture(scope="module")
def pipe():
    return demo_folders.loaded(FOLDER)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECT / "scripts" / "demo_models"))
    return importlib.import_module("pretrain_noise")


def small(recipe: dict, **train) -> dict:
    """The demo's configuration with another recipe, cut down to a second or two."""
    tree = dump(read_run(CONFIG))
    tree["recipe"] = recipe
    tree["prompts"]["per_iteration"] = 2
    tree["evaluate"] |= {"samples": 4, "steps": 3, "average": None}
    tree["model"]["device"] = "cpu"
    tree["train"] |= train
    return tree


def test_the_folder_is_small_and_in_half_precision():
    demo_folders.check_small_and_halved(FOLDER, 3e6, 3)


def test_it_is_of_the_class_of_sd15(pipe):
    """The scheduler's settings are those of SD1.5's folder: the first level is not pure noise."""
    assert type(pipe) is StableDiffusionPipeline and type(pipe.scheduler) is DDIMScheduler
    wanted = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    wanted |= {"set_alpha_to_one": False, "steps_offset": 1, "prediction_type": "epsilon"}
    wanted |= {"timestep_spacing": "leading", "clip_sample": False, "num_train_timesteps": 1000}
    assert wanted.items() <= dict(pipe.scheduler.config).items()
    pipe.scheduler.set_timesteps(10)
    assert pipe.scheduler.timesteps[0] == 901
    for prompt in world.all_prompts():
        ids = pipe.tokenizer(prompt).input_ids
        assert pipe.tokenizer.unk_token_id not in ids
        assert len(ids) == len(prompt.split()) + 2 <= pipe.tokenizer.model_max_length


@pytest.mark.slow
def test_base_accuracy_leaves_room_to_learn(pipe):
    """Held-out prompts, 10 steps, no guidance; the standard error of 136 samples is 4 points."""
    prompts = world.prompts_of("held_out")
    images = pipe(
        prompts,
        num_inference_steps=10,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images
    pairs = zip(detect(images), prompts, strict=True)
    right = [is_exact(found, world.wanted_shapes(prompt)) for found, prompt in pairs]
    assert 0.30 <= sum(right) / len(right) <= 0.75


def test_the_loss_of_training_is_the_noise_error_of_the_pipelines_own_states(script, monkeypatch):
    """A network that knows the clean latents of the own states has no error, with the own words."""
    torch.manual_seed(0)
    pipe = script.make_pipeline(PROJECT / "flowrl" / "demo" / "shapes-sd3")
    assert pipe.unet(torch.randn(1, 4, 8, 8), 5, torch.randn(1, 10, 64)).sample.abs().max() == 0
    monkeypatch.setattr(script, "EMPTY", 0.0)
    x0, prompts = torch.randn(64, 4, 8, 8), ["two red squares"] * 63 + ["a blue circle"]
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def knows(x, timestep, *, encoder_hidden_states, return_dict):
        seen.append((timestep, encoder_hidden_states))
        signal = pipe.scheduler.alphas_cumprod[timestep].view(-1, 1, 1, 1)
        return ((x - signal.sqrt() * x0) / (1 - signal).sqrt(),)

    monkeypatch.setattr(pipe.unet, "forward", knows)
    assert script.noise_loss(pipe, x0, prompts) < 1e-6
    ((timestep, text),) = seen
    assert timestep.min() < 100 and timestep.max() >= 900
    own, _ = pipe.encode_prompt([prompts[0], prompts[-1]], "cpu", 1, False)
    torch.testing.assert_close(text[[0, -1]], own)


def test_the_weighted_error_of_the_noise_is_that_of_the_flows_velocity(script, monkeypatch):
    torch.manual_seed(1)
    pipe = script.make_pipeline(PROJECT / "flowrl" / "demo" / "shapes-sd3")
    x0, seen = torch.randn(64, 4, 8, 8), []
    wrong = torch.randn_like(x0)

    def guesses(x, timestep, *, encoder_hidden_states, return_dict):
        seen.append((x, timestep, encoder_hidden_states))
        return (wrong,)

    monkeypatch.setattr(pipe.unet, "forward", guesses)
    loss = script.noise_loss(pipe, x0, ["two red squares"] * 64)
    ((x, timestep, text),) = seen
    signal = pipe.scheduler.alphas_cumprod[timestep]
    alpha, s = (each.sqrt().view(-1, 1, 1, 1) for each in (signal, 1 - signal))
    off = flow_velocity("epsilon", x, wrong, level(signal)) - ((x - alpha * x0) / s - x0)
    whole = off.square().mean((1, 2, 3))
    most = script.MOST * (wrong - (x - alpha * x0) / s).square().mean((1, 2, 3))
    assert (most < whole).any() and (most > whole).any()
    torch.testing.assert_close(loss, torch.minimum(whole, most).mean(), rtol=1e-3, atol=0)
    empty = pipe.encode_prompt([""], "cpu", 1, False)[0]
    assert 0 < sum(torch.equal(row, empty[0]) for row in text) < 20  # a tenth of 64


def test_pretraining_moves_all_parts(script, tmp_path):
    torch.manual_seed(0)
    pipe = script.make_pipeline(PROJECT / "flowrl" / "demo" / "shapes-sd3")
    weights = [p for part in script.noise_parts(pipe) for p in part.parameters()]
    before = [p.detach().clone() for p in weights]
    prompts = world.prompts_of("train")[:16]
    work = script.Work.quick()
    saved = script.Saved(tmp_path / "saved", "quick")
    script.train_noise(pipe, torch.randn(16, 4, 8, 8), prompts, work, saved)
    moved = sum(not torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    assert moved > 0.5 * len(weights)
    assert all(p.isfinite().all() for p in weights)


@pytest.mark.slow
def test_quick_pretraining_runs_and_its_result_is_of_the_shipped_form(script, tmp_path):
    out = tmp_path / "shapes"
    script.main(script.PretrainArguments(out, quick=True, threads=1))
    shipped = {file.relative_to(FOLDER) for file in FOLDER.rglob("*") if file.is_file()}
    assert {file.relative_to(out) for file in out.rglob("*") if file.is_file()} == shipped
    assert out.with_suffix(".png").is_file()


@pytest.mark.slow
def test_the_proof_passes_and_stored_densities_are_those_of_training(tmp_path):
    """DDPO's own form: noisy DDIM steps. Rows scored by the policy that drew them have ratio 1."""
    recipe = {"name": "ddpo", "steps": 3, "group": 2, "clip": 1e-3}
    session = runs.opened(small(recipe), tmp_path)
    experience = collect(session, 0)
    said = str(session.learner.policy.known_proofs[3, 1.0])
    assert "prediction (epsilon) and decoder equal the pipeline's own call to the bit" in said
    assert "Euler steps are DDIMScheduler's own" in said
    floor = ratio_check.check_ratio(session.learner, experience, session.terminal)
    assert floor is not None and floor < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("method", TABLE["methods"])
def test_every_method_of_the_table_trains_a_step(tmp_path, method):
    recipe = {"name": method} | TABLE["methods"][method]["settings"]["recipe"]
    tree = small(recipe | {"steps": 5, "group": 6}, iterations=1, updates=1)
    assert runs.flowrl("train", runs.write(tree, tmp_path), "--folder", tmp_path / "run") == 0
    assert runs.lines(tmp_path / "run")[-1]["grad_norm"] > 0


@pytest.mark.slow
def test_the_demo_learns_its_prompts(tmp_path):
    """As a user runs it: held-out strict accuracy rises by 0.08 or more, and diversity stays."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "flowrl", "train", str(CONFIG), "--folder", str(folder)]
    subprocess.run(command, check=True, cwd=PROJECT, capture_output=True)
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    key = "held_out/shapes.strict"
    assert lines[-1][key] - lines[0][key] >= 0.08
    assert lines[-1]["held_out/image/diversity"] > 0.8 * lines[0]["held_out/image/diversity"]
