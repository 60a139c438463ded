"""Published reward models on tiny random weights, against raw calls and numbers by hand."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPModel

from rewards import Samples, load
from rewards.catalogue.hps import weights_of
from rewards.checks.gradient_test import gradient_test
from rewards.checks.self_test import Prompts, self_test
from tests.support.reward_contract import check_contract, images, mixed_images, videos
from tests.support.tiny_rewards import (
    LIMIT,
    PROMPTS,
    bytes_of,
    clip_folder,
    pixels,
    prepared,
    samples,
    tokenizer,
)

CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Path:
    """The aesthetic layers, in the published file's names and places."""
    torch.manual_seed(2)
    state = {}
    sizes = (24, 20, 12, 8, 6, 1)
    for place, fan_in, fan_out in zip((0, 2, 4, 6, 7), sizes, sizes[1:], strict=False):
        state[f"layers.{place}.weight"] = torch.randn(fan_out, fan_in) / fan_in**0.5
        state[f"layers.{place}.bias"] = torch.randn(fan_out)
    path = tmp_path_factory.mktemp("head") / "head.pth"
    torch.save(state, path)
    return path


@torch.no_grad()
def raw(folder: Path, media, prompts=PROMPTS) -> torch.Tensor:
    """logits_per_image of each picture's own prompt, one call of CLIPModel without padding."""
    model = CLIPModel.from_pretrained(folder).eval()
    rows = []
    for image, prompt in zip(media, prompts, strict=True):
        ids = tokenizer()(prompt, truncation=True, return_tensors="pt")["input_ids"]
        out = model(pixel_values=prepared(image)[None], input_ids=ids)
        rows.append(out.logits_per_image[0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("shape", [(20, 28), (28, 20), (16, 16), (40, 40)])
def test_clip_and_pickscore_are_the_raw_model(folder, shape):
    media = pixels(len(PROMPTS), *shape)
    logits, scale = raw(folder, media), float(np.exp(2.5))
    assert logits.std() > 0.1
    given = samples(media)

    def score(name: str, **settings):
        return load(name, model=str(folder), device="cpu", **settings)(given)

    torch.testing.assert_close(score("clip"), logits / scale, **CLOSE)
    torch.testing.assert_close(score("clip", kind="logit"), logits, **CLOSE)
    clipscore = 2.5 * (logits / scale).clamp(min=0)
    torch.testing.assert_close(score("clip", kind="clipscore"), clipscore, **CLOSE)
    own = {"processor": str(folder)}
    torch.testing.assert_close(score("pickscore", **own), logits, **CLOSE)
    torch.testing.assert_close(score("pickscore", kind="cosine", **own), logits / scale, **CLOSE)


def test_pickscore_takes_the_processor_that_it_is_told(folder, tmp_path):
    weights = tmp_path / "weights"
    CLIPModel.from_pretrained(folder).save_pretrained(weights)
    media = pixels(len(PROMPTS), 20, 28)
    reward = load("pickscore", model=str(weights), processor=str(folder), device="cpu")
    torch.testing.assert_close(reward(samples(media)), raw(folder, media), **CLOSE)


def test_the_aesthetic_score_is_five_matrices_on_a_unit_vector(folder, head):
    media = pixels(len(PROMPTS), 20, 28)
    reward = load("aesthetic", model=str(folder), head=str(head), device="cpu")
    model = CLIPModel.from_pretrained(folder).eval()
    with torch.no_grad():
        seen = model.vision_model(torch.stack([prepared(image) for image in media])).pooler_output
        vector = model.visual_projection(seen).double().numpy()
    vector /= np.linalg.norm(vector, axis=1, keepdims=True)
    for place in (0, 2, 4, 6, 7):
        layer = {part: torch.load(head)[f"layers.{place}.{part}"] for part in ("weight", "bias")}
        vector = vector @ layer["weight"].double().numpy().T + layer["bias"].double().numpy()
    score = reward(samples(media)).double()
    torch.testing.assert_close(score, torch.from_numpy(vector[:, 0]), **CLOSE)


@pytest.mark.parametrize("name", ["pickscore", "aesthetic"])
@pytest.mark.parametrize("kind", ["image", "video"])
def test_the_gradient_is_that_of_the_plain_score(folder, head, name, kind):
    own = {"processor": str(folder)} if name == "pickscore" else {"head": str(head)}
    reward = load(name, model=str(folder), device="cpu", frames=2, **own)
    line = gradient_test(name, reward, Prompts(("a red ball",), kind=kind))
    assert "rank correlation" in line and "finite differences" in line


def test_a_head_of_other_layers_is_refused(folder, head, tmp_path):
    state = torch.load(head)
    del state["layers.7.bias"]
    torch.save(state, tmp_path / "less.pth")
    with pytest.raises(ValueError, match=r"less\.pth does not hold a head.*layers\.7\.bias"):
        load("aesthetic", model=str(folder), head=str(tmp_path / "less.pth"))
    with pytest.raises(ValueError, match="no such file: nowhere"):
        load("aesthetic", model=str(folder), head="nowhere")


@pytest.mark.parametrize("factory", [images, mixed_images, videos])
def test_the_contract_holds(folder, head, factory):
    own = {"model": str(folder), "device": "cpu", "batch": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = check_contract(load("clip", **own), factory, tolerance=1e-5)
        assert scores.std() > 1e-3
        check_contract(load("pickscore", processor=str(folder), **own), factory, tolerance=1e-5)
        check_contract(load("aesthetic", head=str(head), **own), factory, tolerance=1e-5)


def test_weights_that_a_file_lacks_are_told_and_never_random(folder, tmp_path):
    """transformers fills them in and only logs that."""
    copy = tmp_path / "cut"
    shutil.copytree(folder, copy)
    state = load_file(copy / "model.safetensors")
    del state["visual_projection.weight"]
    save_file(state, copy / "model.safetensors", {"format": "pt"})
    for name in ("clip", "similarity"):
        with pytest.raises(
            ValueError, match=r"cut lacks weights of CLIPModel.*: visual_projection"
        ):
            load(name, model=str(copy))


def test_what_is_cut_of_a_prompt_is_told(folder):
    reward = load("clip", model=str(folder), device="cpu")
    long = "a red ball " * LIMIT
    with pytest.warns(UserWarning, match=f"more than {LIMIT} tokens are truncated"):
        cut = reward(samples(pixels(1, 20, 28), [long]))
    torch.testing.assert_close(cut, raw(folder, pixels(1, 20, 28), [long]) / np.exp(2.5), **CLOSE)
    fits = " ".join(["ball"] * (LIMIT - 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reward(samples(pixels(1), [fits]))


def test_no_samples_are_no_scores(folder, head):
    none = samples(torch.zeros(0, 3, 8, 8), [])
    assert load("clip", model=str(folder), device="cpu")(none).shape == (0,)
    assert load("aesthetic", model=str(folder), head=str(head), device="cpu")(none).shape == (0,)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("clip", {"kind": "dot"}, "kind: expected 'cosine', 'logit' or 'clipscore', not 'dot'"),
        ("clip", {"library": "jax"}, "library: expected 'transformers' or 'open_clip'"),
        ("clip", {"frames": "every 0"}, "'clip': frames: expected all, first, 'every 4' or a num"),
        ("clip", {"aggregate": "sum"}, "aggregate: expected 'mean', .* not 'sum'"),
        ("clip", {"dtype": "int8"}, "dtype: expected 'float32', .*, not 'int8'"),
        ("clip", {"batch": 0}, "batch: expected a number greater than or equal to 1, not 0"),
        ("pickscore", {"kind": "percent"}, "'pickscore': kind: expected 'logit' or 'cosine'"),
        ("hps", {"version": "v3"}, r"'hps': version: expected 'v2\.0' or 'v2\.1', not 'v3'"),
        ("hps", {"kind": "logit"}, "'hps': kind: expected 'cosine' or 'percent'"),
        ("imagereward", {"checkpoint": "nowhere.pt"}, r"imagereward: no such file: nowhere\.pt"),
        ("similarity", {"kind": "lpips"}, "'similarity': kind: expected 'clip' or 'dino'"),
        ("geneval", {"kind": "soft"}, "'geneval': kind: expected 'graded', 'strict'"),
    ],
)
def test_a_wrong_setting_is_told_before_any_weights_are_read(name, settings, message):
    with pytest.raises(ValueError, match=message):
        load(name, **settings)


@pytest.mark.parametrize(
    ("name", "setting", "fetch"),
    [
        ("hps", "checkpoint", lambda: weights_of("v2.1", None)),
        ("aesthetic", "head", lambda: load("aesthetic")),
        ("imagereward", "checkpoint", lambda: load("imagereward")),
    ],
)
def test_weights_that_cannot_be_fetched_are_told_with_the_way_out(
    name, setting, fetch, monkeypatch
):
    def unreachable(repository: str, file: str) -> str:
        raise FileNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    monkeypatch.setattr("rewards.perception.hub.hub_silence", lambda _: None)
    said = rf"^{name}: \S+ of \S+ could not be fetched; name a file with `{setting}`"
    with pytest.raises(ValueError, match=said):
        fetch()


class Dropped(Exception):
    """A failure of an HTTP library that is no OSError, as of huggingface_hub 1 and later."""

    __module__ = "httpx"


@pytest.mark.parametrize("error", [Dropped("reset"), FileNotFoundError("no connection")])
@pytest.mark.parametrize("name", ["videoalign", "clip_flant5", "aesthetic"])
def test_whatever_the_hubs_client_raises_is_a_sentence(name, error, monkeypatch):
    def dropped(*_args: str, **_settings: bool) -> str:
        raise error

    for download in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(f"huggingface_hub.{download}", dropped)
    monkeypatch.setattr("rewards.perception.hub.hub_silence", lambda _: None)
    settings = {"video_fps": 8} if name == "videoalign" else {}
    if name == "clip_flant5":
        settings = {"model": "owner/model"}
    told = rf"^{name}: .* could not be fetched; name .* \({type(error).__name__}"
    with pytest.raises(ValueError, match=told):
        load(name, **settings)


def test_similarity_is_the_cosine_of_two_pictures(folder, tmp_path):
    media, others = pixels(4, 20, 28), pixels(2, 28, 20)
    for i, image in enumerate(others):
        bytes_of(image).save(tmp_path / f"{i}.png")
    bytes_of(media[3]).save(tmp_path / "same.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    named = ["0.png", "1.png", "broken.png", "same.png"]
    meta = [{"source": str(tmp_path / name)} for name in named]
    reward = load("similarity", model=str(folder), column="source", device="cpu")
    with pytest.warns(
        UserWarning, match=r"similarity: .*broken\.png: not a PNG, JPEG or WebP image"
    ):
        score = reward(samples(media, ["p"] * 4, meta))
    model = CLIPModel.from_pretrained(folder).eval()
    with torch.no_grad():
        both = torch.stack([prepared(image) for image in (*media[:2], *others)])
        seen = model.visual_projection(model.vision_model(both).pooler_output)
    wanted = torch.nn.functional.cosine_similarity(seen[:2], seen[2:])
    torch.testing.assert_close(score[:2], wanted, **CLOSE)
    assert score[2].isnan()
    assert score[3] == pytest.approx(1.0, abs=1e-6)
    assert (
        load("similarity", model=str(folder), device="cpu")(samples(media, ["p"] * 4)).isnan().all()
    )
    first = load("similarity", model=str(folder), column="source", device="cpu")
    torch.testing.assert_close(first(samples(media[:1], ["p"], meta[:1])), score[:1], **CLOSE)


@pytest.mark.parametrize("factory", [images, mixed_images, videos])
def test_similarity_keeps_the_contract(folder, tmp_path, factory):
    """Each sample has a reference of its own, but for one that has none."""
    for i, image in enumerate(pixels(6, 20, 28)):
        bytes_of(image).save(tmp_path / f"{i}.png")
    reward = load("similarity", model=str(folder), device="cpu")

    def made(prompts):
        given = factory(prompts)
        meta = [{"reference": str(tmp_path / f"{i}.png")} for i in range(len(prompts))]
        return Samples(given.media, given.prompts, given.group, [*meta[:5], {}])

    scores = check_contract(reward, made, tolerance=1e-5)
    assert scores.isnan().tolist() == [False] * 5 + [True]


def test_dino_compares_class_tokens(tmp_path):
    from transformers import Dinov2Config, Dinov2Model, ViTImageProcessor

    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Dinov2Model(Dinov2Config(image_size=16, patch_size=4, **small)).eval()
    model.save_pretrained(tmp_path)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    ViTImageProcessor(size={"height": 16, "width": 16}, **half).save_pretrained(tmp_path)
    media = torch.stack([pixels(1, 16, 16)[0], pixels(2, 16, 16)[1]])
    bytes_of(media[1]).save(tmp_path / "reference.png")
    reward = load("similarity", kind="dino", model=str(tmp_path), device="cpu")
    meta = [{"reference": str(tmp_path / "reference.png")}] * 2
    score = reward(samples(media, ["p"] * 2, meta))
    whole = (media * 255).round() / 255
    with torch.no_grad():
        token = model((whole - 0.5) / 0.5).last_hidden_state[:, 0]
    wanted = torch.nn.functional.cosine_similarity(token, token[1:])
    torch.testing.assert_close(score, wanted, **CLOSE)
    assert score[0] < 0.999


def test_distance_is_that_of_the_nearest_other_image_of_the_group(folder):
    media = torch.cat([pixels(5, 20, 28), pixels(2, 20, 28)[1:]])
    group = torch.tensor([0, 0, 0, 1, 1, 2])
    reward = load("distance", kind="clip", model=str(folder), device="cpu", batch=4)
    score = reward(Samples(media, ["p"] * 6, group))
    model = CLIPModel.from_pretrained(folder).eval()
    with torch.no_grad():
        both = torch.stack([prepared(image) for image in media])
        seen = model.visual_projection(model.vision_model(both).pooler_output).double()
    for i in range(5):
        others = [j for j in range(6) if j != i and group[j] == group[i]]
        cosines = [float(seen[i] @ seen[j] / seen[i].norm() / seen[j].norm()) for j in others]
        assert float(score[i]) == pytest.approx(1 - max(cosines), abs=2e-6)
    assert score[5].isnan() and len(set(score[:3].tolist())) > 1
    copies = reward(Samples(media[:1].expand(4, -1, -1, -1), ["p"] * 4, torch.zeros(4).long()))
    assert copies.tolist() == [0.0] * 4


@pytest.mark.parametrize("factory", [images, mixed_images])
def test_distance_keeps_the_contract_and_takes_images_alone(folder, factory):
    reward = load("distance", kind="clip", model=str(folder), device="cpu")
    scores = check_contract(reward, factory, pointwise=False, tolerance=1e-5)
    assert len(scores.unique()) > 1
    assert self_test("distance", reward).startswith("distance: ")
    with pytest.raises(ValueError, match="'distance' scores images; it was given videos"):
        reward(videos(["a", "b"]))


def test_media_of_text_are_refused(folder):
    with pytest.raises(ValueError, match="'clip' scores images or videos; it was given text"):
        load("clip", model=str(folder), device="cpu")(
            Samples(["words"], ["a cat"], torch.zeros(1, dtype=torch.long))
        )
