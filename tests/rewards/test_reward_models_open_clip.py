"""HPSv2 and open_clip's CLIP on tiny random weights, against raw open_clip and torchvision calls.

Skipped where open_clip is not installed; `make test-open-clip` runs them in an environment that has
it, and so does CI.
"""

import importlib.util
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rewards import load
from rewards.checks.gradient_test import gradient_test
from rewards.checks.self_test import Prompts
from scripts.authors.common import state_of
from tests.rewards.test_authors import arrays, equal, given, script
from tests.support.reward_contract import check_contract, images, mixed_images
from tests.support.tiny_rewards import bytes_of, pixels, prepared, samples

SIDE = 16
PROMPTS = ["a red ball", "two cats on a table", "", 'a sign "STOP" by the road', "a red ball"]
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module")
def open_clip():
    if importlib.util.find_spec("open_clip") is None:
        pytest.skip("open_clip is not installed")
    return importlib.import_module("open_clip")


@pytest.fixture(scope="module")
def tiny(open_clip, tmp_path_factory):
    """(name of a tiny architecture, the model, a checkpoint as HPSv2's, a folder as the hub's)."""
    folder = tmp_path_factory.mktemp("open_clip")
    config = {
        "embed_dim": 24,
        "vision_cfg": {"image_size": SIDE, "layers": 2, "width": 32, "head_width": 16},
        "text_cfg": {"width": 32, "heads": 2, "layers": 2},
    }
    config["vision_cfg"]["patch_size"] = 4
    (folder / "flowrl-tiny.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / "flowrl-tiny.json")
    torch.manual_seed(0)
    model = open_clip.create_model("flowrl-tiny", load_weights=False).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
        model.logit_scale.fill_(2.0)
    checkpoint = folder / "hps.pt"
    torch.save({"epoch": 1, "state_dict": model.state_dict()}, checkpoint)
    hub = folder / "hub"
    hub.mkdir()
    (hub / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    torch.save(model.state_dict(), hub / "open_clip_pytorch_model.bin")
    return "flowrl-tiny", model, checkpoint, hub


@torch.no_grad()
def cosine(open_clip, model, inputs: torch.Tensor) -> torch.Tensor:
    tokens = open_clip.get_tokenizer("flowrl-tiny")(PROMPTS)
    both = model.encode_image(inputs), model.encode_text(tokens)
    return torch.nn.functional.cosine_similarity(*both)


def letterboxed(image: torch.Tensor) -> torch.Tensor:
    """HPSv2's own preparation, in torchvision's words."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as tv

    array = np.asarray(bytes_of(image))
    x = torch.from_numpy(array.transpose(2, 0, 1).copy()).float() / 255
    scale = SIDE / max(x.shape[1:])
    size = [round(length * scale) for length in x.shape[1:]]
    if scale != 1:
        x = tv.resize(x, size, InterpolationMode.BICUBIC, antialias=True)
    below, beside = (SIDE - length for length in x.shape[1:])
    x = tv.pad(x, [beside // 2, below // 2, beside - beside // 2, below - below // 2], fill=0)
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    return tv.normalize(x, mean, std)


def test_hpsv2_scores_as_the_authors(open_clip, tmp_path, monkeypatch):
    theirs, tool = arrays("hps"), script("hps", monkeypatch)
    (tmp_path / f"{tool.NAME}.json").write_text(json.dumps(tool.CONFIG))
    open_clip.add_model_config(tmp_path / f"{tool.NAME}.json")
    torch.save({"epoch": 1, "state_dict": state_of(theirs["layout"])}, tmp_path / "HPS.pt")
    own = {"architecture": tool.NAME, "checkpoint": str(tmp_path / "HPS.pt"), "device": "cpu"}
    reward = load("hps", **own)
    for kind in tool.SIZES:
        equal(reward(given(tool.images(kind))), theirs[kind], 1e-5)


@pytest.mark.parametrize("shape", [(20, 27), (27, 20), (16, 16), (9, 13), (13, 9), (64, 31)])
def test_hpsv2_is_the_cosine_of_a_letterboxed_picture(open_clip, tiny, shape):
    name, model, checkpoint, _ = tiny
    media = pixels(len(PROMPTS), *shape)
    wanted = cosine(open_clip, model, torch.stack([letterboxed(image) for image in media]))
    assert wanted.std() > 0.01
    own = {"architecture": name, "checkpoint": str(checkpoint), "device": "cpu"}
    score = load("hps", **own)(samples(media, PROMPTS))
    torch.testing.assert_close(score, wanted, **CLOSE)
    percent = load("hps", kind="percent", **own)(samples(media, PROMPTS))
    torch.testing.assert_close(percent, 100 * wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("shape", [(20, 28), (16, 16)])
def test_clip_by_open_clip_is_the_raw_model(open_clip, tiny, shape):
    _, model, _, hub = tiny
    media = pixels(len(PROMPTS), *shape)
    wanted = cosine(open_clip, model, torch.stack([prepared(image, SIDE) for image in media]))
    own = {"model": f"local-dir:{hub}", "library": "open_clip", "device": "cpu"}
    score = load("clip", **own)(samples(media, PROMPTS))
    torch.testing.assert_close(score, wanted, **CLOSE)
    logit = load("clip", kind="logit", **own)(samples(media, PROMPTS))
    torch.testing.assert_close(logit, np.float32(np.exp(2.0)) * wanted, rtol=0, atol=1e-4)


def test_imagerewards_square_is_torchvisions(open_clip):
    """Odd cuts too, where torchvision rounds a half to even."""
    from torchvision import transforms

    from rewards.catalogue.imagereward import middle
    from rewards.perception.embedding import OPENAI_MEAN, OPENAI_STD

    whole = transforms.Compose(
        [
            transforms.Resize(SIDE, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(SIDE),
            transforms.ToTensor(),
            transforms.Normalize(OPENAI_MEAN, OPENAI_STD),
        ]
    )
    for shape in ((16, 16), (16, 17), (19, 16), (21, 16), (40, 23), (23, 61), (7, 9)):
        image: Image.Image = bytes_of(pixels(1, *shape)[0])
        torch.testing.assert_close(middle(image, SIDE), whole(image), **CLOSE)


@pytest.mark.parametrize("factory", [images, mixed_images])
def test_the_contract_holds(tiny, factory):
    name, _, checkpoint, _ = tiny
    reward = load("hps", architecture=name, checkpoint=str(checkpoint), device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_contract(reward, factory, tolerance=1e-5)
    with pytest.warns(UserWarning, match="more than 77 tokens are truncated"):
        reward(samples(pixels(1), ["a red ball " * 40]))


@pytest.mark.parametrize("name", ["hps", "clip"])
def test_the_gradient_is_that_of_the_plain_score(tiny, name):
    architecture, _, checkpoint, hub = tiny
    own = {
        "hps": {"architecture": architecture, "checkpoint": str(checkpoint)},
        "clip": {"model": f"local-dir:{hub}", "library": "open_clip"},
    }
    line = gradient_test(name, load(name, device="cpu", **own[name]), Prompts(("a red ball",)))
    assert "rank correlation" in line and "finite differences" in line


def test_what_cannot_be_loaded_is_told(tiny, tmp_path: Path):
    name, model, _, _ = tiny
    with pytest.raises(
        ValueError, match="ViT-L-14' does not name weights: write ViT-L-14/<weights>"
    ):
        load("clip", model="ViT-L-14", library="open_clip")
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    with pytest.raises(ValueError, match=r"bare\.pt has no entry state_dict"):
        load("hps", architecture=name, checkpoint=str(tmp_path / "bare.pt"))


def test_without_open_clip_the_way_out_is_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'flowrl\[rewards\]'"):
        load("hps")
