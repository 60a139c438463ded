"""The demo's learned reward: its shipped weights, and how they are made."""

import random

import pytest
import torch
import train_demo_clip as script
from transformers import CLIPModel, PreTrainedTokenizerFast

from flowrl.demo import world
from flowrl.paths import PROJECT
from flowrl.settings.read import check_run, read_run
from rewards import Samples, load
from rewards.catalogue.shapes import detect, is_exact
from tests.support.reward_contract import check_contract, images

FOLDER = PROJECT / "flowrl" / "demo" / "shapes-clip"


@pytest.fixture(scope="module")
def reward():
    return load("clip", model=str(FOLDER), device="cpu")


def pairs(split: world.Split, n: int = 150):
    """(prompts, pictures of them, pictures of near misses)."""
    rng = random.Random(f"{split} pairs")
    wanted, pictures = script.draw(world.draw_prompts(n, rng, split), rng)
    return [script.caption(w) for w in wanted[:n]], pictures[:n], pictures[n:]


def score(reward, pictures, prompts):
    return reward(Samples(pictures, prompts, torch.arange(len(prompts))))


def test_the_weights_are_small():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1.5e6
    model = CLIPModel.from_pretrained(FOLDER)
    assert 0.25e6 < sum(p.numel() for p in model.parameters()) < 0.4e6
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_right_picture_scores_above_a_near_miss(reward, split):
    """Measured: 0.995 of 1,000 pairs of train prompts, 1.000 of held-out prompts."""
    prompts, right, wrong = pairs(split)
    better = score(reward, right, prompts) > score(reward, wrong, prompts)
    assert better.float().mean() >= 0.97


def test_the_score_is_the_raw_models_cosine(reward):
    prompts, pictures, _ = pairs("held_out", 12)
    pictures = pictures.mul(255).round() / 255
    model, words = (
        CLIPModel.from_pretrained(FOLDER),
        PreTrainedTokenizerFast.from_pretrained(FOLDER),
    )
    text = words(prompts, padding=True, return_tensors="pt")
    with torch.no_grad():
        out = model(
            input_ids=text["input_ids"],
            attention_mask=text["attention_mask"],
            pixel_values=pictures * 2 - 1,
        )
    wanted = out.logits_per_image.diagonal() / model.logit_scale.exp()
    torch.testing.assert_close(score(reward, pictures, prompts), wanted, rtol=0, atol=1e-5)


def test_larger_pictures_of_the_same_scene_score_alike(reward):
    rng = random.Random(1)
    prompts = world.draw_prompts(20, rng)
    scenes = [world.arrange(world.wanted_shapes(prompt), rng) for prompt in prompts]
    small, large = (score(reward, world.render(scenes, size), prompts) for size in (32, 96))
    assert (small - large).abs().max() < 0.1


@pytest.mark.filterwarnings("ignore:prompts of more than 10 tokens")
def test_the_contract_holds(reward):
    check_contract(reward, images, tolerance=1e-5)


def test_a_near_miss_is_false_and_a_train_prompt():
    """The rule checker says so: a picture of the one is no picture of the other."""
    rng = random.Random(0)
    for split in ("train", "held_out"):
        prompts = world.draw_prompts(150, rng, split)
        wanted = [world.wanted_shapes(prompt) for prompt in prompts]
        others = [script.near_miss(w, rng) for w in wanted]
        assert [script.caption(w) for w in wanted] == prompts
        assert all(world.split(script.caption(other)) == "train" for other in others)
        found = detect(world.render_images(prompts, rng))
        passed = [is_exact(things, other) for things, other in zip(found, others, strict=True)]
        assert not any(passed)


def test_captions_that_are_true_of_one_picture_mean_the_same():
    one = world.wanted_shapes("a red circle left of a blue square")
    other = world.wanted_shapes("a blue square right of a red circle")
    assert script.meaning(one) == script.meaning(other)
    assert script.meaning(one) != script.meaning(
        world.wanted_shapes("a blue square left of a red circle")
    )
    above = script.meaning(world.wanted_shapes("a red circle above a blue square"))
    assert above == script.meaning(world.wanted_shapes("a blue square below a red circle")) != one


def test_a_caption_that_is_also_true_is_no_negative():
    """Two captions of one picture: neither is pushed away, so the loss does not see the other."""
    torch.manual_seed(0)
    tokenizer = script.make_tokenizer(world.all_prompts())
    model = script.make_model(tokenizer)
    texts = ["a red circle left of a blue square", "a blue square right of a red circle"]
    wanted = [world.wanted_shapes(text) for text in texts]
    pictures = world.render_images(texts, random.Random(0))
    assert script.contrast(model, tokenizer, wanted, pictures).item() == pytest.approx(0, abs=1e-6)
    others = [wanted[0], world.wanted_shapes("a red circle above a blue square")]
    assert script.contrast(model, tokenizer, others, pictures).item() > 0.1


@pytest.mark.slow
def test_the_script_makes_a_folder_that_the_reward_loads(tmp_path, capsys):
    script.main(tmp_path / "one", quick=True, threads=1)
    script.main(tmp_path / "two", quick=True, threads=1)
    assert "right above near miss, held_out prompts" in capsys.readouterr().out
    prompts, pictures, _ = pairs("train", 6)
    one, two = (
        score(load("clip", model=str(tmp_path / name), device="cpu"), pictures, prompts)
        for name in ("one", "two")
    )
    assert torch.equal(one, two)  # the seed decides everything
    saved = {file.name for file in (tmp_path / "one").iterdir()}
    assert saved == {file.name for file in FOLDER.iterdir()}


def test_the_configuration_trains_on_it_alone_and_holds_the_checker_out():
    run = read_run(PROJECT / "configs" / "demo_learned_reward.yaml")
    check_run(run)
    assert [(spec.name, spec.settings["model"]) for spec in run.rewards] == [
        ("clip", "flowrl/demo/shapes-clip")
    ]
    assert [(spec.name, spec.settings) for spec in run.held_out_rewards] == [
        ("shapes", {"kind": "strict"})
    ]


def test_the_demos_folder_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts, pictures, _ = pairs("train", 2)
    anywhere = load("clip", model="flowrl/demo/shapes-clip", device="cpu")
    assert score(anywhere, pictures, prompts).shape == (2,)
