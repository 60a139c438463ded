"""The safety gate on tiny random weights: against transformers' and diffusers' own classes."""

import pytest
import torch
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from flowrl.run.evaluate.start_checks import black_images
from rewards import load
from rewards.types import reports
from tests.support.reward_contract import check_contract, images, videos
from tests.support.tiny_pipelines_unet import sd15
from tests.support.tiny_rewards import SIDE, pixels, prepared, samples

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def vit(tmp_path):
    """The unsafe label comes first here, as an index would get wrong."""
    torch.manual_seed(0)
    config = ViTConfig(image_size=16, patch_size=4, **SMALL, initializer_range=0.5)
    config.id2label, config.label2id = {0: "nsfw", 1: "normal"}, {"nsfw": 0, "normal": 1}
    model = ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    ViTImageProcessor(size={"height": 16, "width": 16}, **half).save_pretrained(tmp_path)
    return tmp_path, model


def test_a_classifier_scores_one_minus_the_unsafe_class(vit):
    folder, model = vit
    media = (pixels(5, 16, 16) * 255).round() / 255
    with torch.no_grad():
        unsafe = model((media - 0.5) / 0.5).logits.softmax(-1)[:, 0]
    reward = load("safety", model=str(folder), device="cpu")
    score = reward(samples(media))
    torch.testing.assert_close(score, 1 - unsafe, rtol=0, atol=1e-5)
    assert reports({"gate": reward}) == {
        "calls/gate/flagged": float((unsafe >= 0.5).float().mean())
    }
    assert reports({"gate": reward}) == {}
    other = load("safety", model=str(folder), device="cpu", label="Normal")
    torch.testing.assert_close(other(samples(media)), unsafe, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="has no label 'porn'; it has nsfw, normal"):
        load("safety", model=str(folder), label="porn")
    check_contract(reward, images, tolerance=1e-5)
    check_contract(reward, videos, tolerance=1e-5)
    gate = load("gate", reward="brightness", where=reward, above=float(score.median()), floor=-1.0)
    assert (gate(samples(media)) == -1).sum() == 2


@pytest.fixture
def checker(tmp_path):
    torch.manual_seed(1)
    vision = {**SMALL, "intermediate_size": 24, "image_size": SIDE, "patch_size": 4}
    text = {**SMALL, "intermediate_size": 24}
    config = CLIPConfig(vision_config=vision, text_config=text, projection_dim=12)
    model = StableDiffusionSafetyChecker(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.4 * torch.randn_like(weight))
    model.save_pretrained(tmp_path)
    size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    CLIPImageProcessor(**size).save_pretrained(tmp_path)
    return tmp_path, model


def published(folder, model) -> None:
    """The names of the hub's file, and its buffer of positions."""
    state = {}
    for name, value in model.state_dict().items():
        inner = name.replace("vision_model.", "")
        tower = name.startswith("vision_model.")
        state[f"vision_model.vision_model.{inner}" if tower else name] = value.clone()
    state["vision_model.vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    save_file(state, folder / "model.safetensors")


def test_concepts_are_flagged_as_by_diffusers(checker):
    folder, model = checker
    colours = torch.rand(12, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    media = 0.2 * pixels(12, 20, 28) + 0.8 * colours
    clip = torch.stack([prepared(image) for image in media])
    with torch.no_grad():
        unit = torch.nn.functional.normalize(model.visual_projection(model.vision_model(clip)[1]))
        cosine = unit @ torch.nn.functional.normalize(model.concept_embeds).mT
        care = unit @ torch.nn.functional.normalize(model.special_care_embeds).mT
        # thresholds that split these images
        model.concept_embeds_weights.fill_(float(cosine.amax(1).quantile(0.45)))
        model.special_care_embeds_weights.fill_(float(care.amax(1).quantile(0.6)))
    model.save_pretrained(folder)
    _, flagged = model(clip, torch.zeros(12, 1))
    special = ((care - model.special_care_embeds_weights).round(decimals=3) > 0).any(1)
    assert 0 < sum(flagged) < 12 and 0 < special.sum() < 12
    wanted = (cosine - model.concept_embeds_weights).amax(1) + 0.01 * special
    given = samples(media, ["a"] * 12)
    first = load("safety", kind="concepts", model=str(folder), device="cpu")(given)
    published(folder, model)
    reward = load("safety", kind="concepts", model=str(folder), device="cpu")
    score = reward(given)
    assert torch.equal(first, score)
    torch.testing.assert_close(score, -wanted.detach(), rtol=0, atol=2e-3)
    assert (score < 0).tolist() == flagged
    assert reports({"safe": reward})["calls/safe/flagged"] == pytest.approx(sum(flagged) / 12)
    alone = torch.cat([reward(given.take([i])) for i in range(12)])
    torch.testing.assert_close(alone, score, rtol=0, atol=1.1e-3)


def test_another_file_is_refused(checker):
    folder, model = checker
    published(folder, model)
    state = load_file(folder / "model.safetensors")
    state["vision_model.vision_model.extra.weight"] = torch.zeros(1)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"extra\.weight missing or unexpected"):
        load("safety", kind="concepts", model=str(folder))
    del state["concept_embeds"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match="is not a safety checker: it lacks concept_embeds"):
        load("safety", kind="concepts", model=str(folder))


def test_a_pipeline_with_its_own_checker_warns_of_black_images(checker):
    pipe = sd15()
    assert not [*black_images(pipe)]
    pipe.register_modules(safety_checker=checker[1])
    (sentence,) = black_images(pipe)
    assert "becomes a black image, which is scored and trained on" in sentence
