"""Models that have features alone: SigLIP, DINOv2, and the last hidden state of texts."""

import json

import numpy as np
import pytest
import torch
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoTokenizer,
    Dinov2Config,
    Dinov2Model,
    SiglipConfig,
    SiglipModel,
)

from rewards import Samples
from rewards.catalogue.fitted import load_columns
from rewards.fitted.folder import FeatureSource, weights_digest
from rewards.perception.media import to_pil
from tests.support.advice import advice
from tests.support.reward_contract import images, videos

PROMPTS = ("a red square", "a blue circle", "two cats")
SUMS = "flowrl/demo/sums-lm"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny models with random weights, and their processors."""
    place = tmp_path_factory.mktemp("towers")
    torch.manual_seed(0)
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    tower["num_attention_heads"] = 2
    tokenizer = AutoTokenizer.from_pretrained("flowrl/demo/shapes-clip")
    siglip = SiglipConfig(
        text_config={**tower, "vocab_size": len(tokenizer) + 8, "max_position_embeddings": 12},
        vision_config={**tower, "image_size": 16, "patch_size": 8},
    )
    SiglipModel(siglip).save_pretrained(place / "siglip")
    tokenizer.save_pretrained(place / "siglip")
    dinov2 = Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    Dinov2Model(dinov2).save_pretrained(place / "dinov2")
    plain = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}
    plain |= {"rescale_factor": 1 / 255, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    kinds = {
        "siglip": {"image_processor_type": "SiglipImageProcessor"},
        "dinov2": {"image_processor_type": "BitImageProcessor", "do_center_crop": True},
    }
    size = {"siglip": {"height": 16, "width": 16}, "dinov2": {"shortest_edge": 20}}
    for name, kind in kinds.items():
        more = {"crop_size": {"height": 16, "width": 16}} if name == "dinov2" else {}
        config = {**plain, **kind, "size": size[name], **more}
        (place / name / "preprocessor_config.json").write_text(json.dumps(config))
    return place


def columns_of(name, model):
    return load_columns([FeatureSource(name, {"model": str(model)})])


@pytest.mark.parametrize(("name", "width"), [("siglip", 32), ("dinov2", 16)])
def test_features_of_images_and_videos(name, width, folders):
    columns = columns_of(name, folders / name)
    samples = images(PROMPTS)
    found = columns.of(samples)
    assert found.shape == (3, width) and columns.kinds == ("image", "video") and columns.graded
    assert abs((found[:, :16] ** 2).sum(1) - 1).max() < 1e-6, "unit vectors"
    alone = columns.of(samples.take([1]))
    assert abs(alone[0] - found[1]).max() < 1e-6, "a row depends on its own sample"
    moving = videos(PROMPTS)
    frames = [columns.of(images_of(moving, row)).mean(0) for row in range(3)]
    assert abs(columns.of(moving) - np.stack(frames)).max() < 1e-6


def images_of(moving, row):
    frames = moving.media[row]
    return Samples(frames, [moving.prompts[row]] * len(frames), torch.zeros(len(frames)).long())


@pytest.mark.parametrize("name", ["siglip", "dinov2", "patches"])
def test_features_have_a_gradient_and_agree_up_to_rounding(name, folders):
    folder = folders / ("siglip" if name == "patches" else name)
    columns, samples = columns_of(name, folder), images(PROMPTS)
    media = samples.media.clone().requires_grad_(True)
    graded = columns.with_gradient(media, samples)
    graded.sum().backward()
    assert media.grad.abs().max() > 0
    assert abs(graded.detach().double().numpy() - columns.of(samples)).max() < 0.02


def test_the_prompts_part_is_a_product_and_dinov2_has_none(folders):
    samples = images(PROMPTS)
    other = Samples(samples.media, ["a dog"] * 3, samples.group)
    siglip, dinov2 = (columns_of(name, folders / name) for name in ("siglip", "dinov2"))
    one, two = siglip.of(samples), siglip.of(other)
    assert (one[:, :16] == two[:, :16]).all() and (one[:, 16:] != two[:, 16:]).any()
    assert (dinov2.of(samples) == dinov2.of(other)).all()


TOWERS = {"clip": 1, "siglip": 0, "dinov2": 1}  # tokens before the patches


@pytest.mark.parametrize(("kind", "before"), TOWERS.items())
def test_patches_are_means_inside_the_tower_of_each_type(kind, before, folders):
    folder = "flowrl/demo/shapes-clip" if kind == "clip" else folders / kind
    columns, samples = columns_of("patches", folder), images(PROMPTS)
    found = columns.of(samples)
    model = AutoModel.from_pretrained(folder).eval()
    tower = model if kind == "dinov2" else model.vision_model
    blocks = tower.encoder.layer if kind == "dinov2" else tower.encoder.layers
    seen = []
    for block in blocks:
        block.register_forward_hook(
            lambda _, __, out: seen.append(out if isinstance(out, torch.Tensor) else out[0])
        )
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = processor([to_pil(image) for image in samples.media], return_tensors="pt")
    with torch.no_grad():
        tower(**pixels)
    middle = seen[(len(seen) + 1) // 2 - 1]
    own = torch.cat([state[:, before:].mean(1) for state in (middle, seen[-1])], 1)
    assert abs(found - own.double().numpy()).max() < 1e-4
    other = Samples(samples.media, ["a dog"] * 3, samples.group)
    assert (columns.of(other) == found).all(), "the prompt has no part in it"
    assert columns.graded and columns.kinds == ("image", "video")


def test_patches_of_a_model_without_an_image_tower_are_a_sentence(folders):
    for kind in TOWERS:
        folder = "flowrl/demo/shapes-clip" if kind == "clip" else folders / kind
        advice(
            "patches: {} is a model of type {}: use one of type clip, siglip or dinov2",
            lambda: columns_of("patches", SUMS),
            lambda folder=folder: columns_of("patches", folder),
        )


def texts(answers):
    return Samples(list(answers), list(PROMPTS[: len(answers)]), torch.arange(len(answers)))


def test_the_last_hidden_state_of_a_text_is_the_models_own():
    columns = columns_of("last_hidden", SUMS)
    given = texts(["1 2 3", "4", "55 + 1 = 56"])
    found = columns.of(given)
    tokenizer, model = AutoTokenizer.from_pretrained(SUMS), AutoModel.from_pretrained(SUMS)
    for row, answer in enumerate(given.media):
        chat = [{"role": "user", "content": PROMPTS[row]}]
        chat.append({"role": "assistant", "content": answer})
        text = (
            tokenizer.apply_chat_template(chat, tokenize=False)
            if tokenizer.chat_template
            else f"{PROMPTS[row]}\n\n{answer}"
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
        with torch.no_grad():
            own = model.float().eval()(input_ids=ids["input_ids"]).last_hidden_state[0, -1]
        assert abs(found[row] - own.double().numpy()).max() < 1e-4
    assert columns.kinds == ("text",) and not columns.graded
    assert weights_digest(columns.rewards[0])


def test_images_are_no_texts_and_a_mixture_has_no_sample(folders):
    with pytest.raises(ValueError, match="scores text; it was given images"):
        columns_of("last_hidden", SUMS).of(images(PROMPTS))
    sources = [
        FeatureSource("last_hidden", {"model": SUMS}),
        FeatureSource("dinov2", {"model": str(folders / "dinov2")}),
    ]
    for alone in sources:
        advice(
            "features: some are of images and some of texts, so no sample has all of them: use "
            "either",
            lambda: load_columns(sources),
            lambda alone=alone: load_columns([alone]),
        )
