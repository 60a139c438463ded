"""HPSv3 and VideoReward on tiny random files in the published layouts, computed a second time."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rewards import Samples, load
from rewards.catalogue.hpsv3 import INSTRUCTION
from rewards.catalogue.videoalign import VIDEO_INSTRUCTION, DataFields, frame_places
from rewards.perception.qwen import image_patches, resized, video_patches
from rewards.perception.scalar_heads import INSTRUCTION_TAIL
from tests.support.advice import advice
from tests.support.reward_contract import check_contract, images
from tests.support.tiny_qwen import (
    base_folder,
    head,
    new_names,
    old_names,
    tiny_model,
    whole_tokenizer,
)
from tests.support.tiny_rewards import bytes_of, pixels, samples

CLOSE = {"rtol": 0, "atol": 2e-4}
REWARD = "<|Reward|>"
CPU = {"device": "cpu", "dtype": "float32"}


@pytest.mark.parametrize(
    ("side", "wanted"),
    [
        ((1024, 1024), (448, 448)),
        ((512, 512), (448, 448)),
        ((64, 64), (448, 448)),
        ((768, 1344), (336, 588)),
        ((1080, 1920), (336, 588)),
        ((200, 300), (392, 560)),
    ],
)
def test_images_have_the_published_sizes(side, wanted):
    assert resized(*side, 200_704, 200_704) == wanted


@pytest.mark.parametrize(
    ("side", "wanted"),
    [
        ((480, 832), (336, 588)),
        ((720, 1280), (336, 588)),
        ((240, 320), (280, 392)),
        ((256, 256), (336, 336)),
        ((320, 576), (308, 588)),
    ],
)
def test_videos_have_the_published_sizes(side, wanted):
    assert resized(*side, 100_352, 200_704) == wanted


@pytest.mark.parametrize(
    ("total", "fps", "wanted"),
    [
        (81, 16, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),
        (49, 8, [0, 4, 9, 13, 17, 22, 26, 31, 35, 39, 44, 48]),
        (33, 15, [0, 11, 21, 32]),
        (46, 8, [0, 4, 8, 12, 16, 20, 25, 29, 33, 37, 41, 45]),  # 11.5 frames become 12
        (3, 24, [0, 2]),
    ],
)
def test_frames_are_those_of_the_authors(total, fps, wanted):
    fields = {"fps": 2, "max_frame_pixels": 200_704, "sample_type": "uniform"}
    fields |= {"eval_dim": ["VQ", "MQ", "TA"], "prompt_template_type": "detailed_special"}
    data = DataFields.model_validate(fields)
    assert frame_places(total, float(fps), data) == wanted
    assert len(frame_places(129, 24.0, data)) == 10
    with pytest.raises(ValueError, match="at least 2 frames, not 1"):
        frame_places(1, float(fps), data)


def test_patches_are_the_processors():
    processor = Qwen2VLImageProcessorPil(min_pixels=12_544, max_pixels=12_544)
    image = bytes_of(pixels(1, 90, 133)[0])
    own, wanted = image_patches(image, 12_544), processor([image], return_tensors="pt")
    assert (
        own.grid == tuple(wanted["image_grid_thw"][0].tolist())
        and own.tokens == len(own.values) / 4
    )
    torch.testing.assert_close(own.values, wanted["pixel_values"], rtol=0, atol=1e-5)


def test_pairs_of_frames_are_one_step_of_time():
    frames = (pixels(3, 56, 56) * 255).round() / 255
    twice = video_patches(frames.repeat_interleave(2, 0), 3136, 3136)
    assert twice.grid == (3, 4, 4)
    for step, frame in enumerate(frames):
        alone = image_patches(bytes_of(frame), 3136).values
        torch.testing.assert_close(twice.values[16 * step : 16 * step + 16], alone)
    assert video_patches(frames, 3136, 3136).grid == (2, 4, 4)


def known(monkeypatch, published, text: str) -> None:
    """Tests have a short text of their own, under its own digest."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    monkeypatch.setitem(published.__dict__, "length", len(text))
    monkeypatch.setitem(published.__dict__, "digest", digest)


@torch.no_grad()
def states(model, words, text: str, pad: str, grid: list[int], values: Tensor, **options) -> Tensor:
    """States of one row, by the whole model of transformers with sequential positions."""
    ids = words(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    seen = model.get_image_features(values, torch.tensor([grid])).pooler_output
    vectors = model.get_input_embeddings()(ids)
    vectors[ids == words.convert_tokens_to_ids(pad)] = torch.cat(seen)
    return model.language_model(inputs_embeds=vectors, **options).last_hidden_state[0]


def chat(shown: str, text: str) -> str:
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"<|vision_start|>{shown}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.fixture
def small_images(monkeypatch):
    monkeypatch.setattr("rewards.catalogue.hpsv3.PIXELS", 56 * 56)


class Hps:
    """A tiny HPSv3: its files, and its score computed by hand."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder = base_folder(folder / "base")
        self.words = whole_tokenizer(self.folder, (REWARD,))
        self.model = tiny_model(self.folder, len(self.words))
        self.head = head("rm_head.", 32, 16, 8, 2)
        text = "\nRate it.  \nTextual prompt - {text_prompt}\n\n\n"
        self.text = text + INSTRUCTION_TAIL
        known(monkeypatch, INSTRUCTION, self.text)
        self.file = folder / "instruction.py"
        self.file.write_text(f"INSTRUCTION = {text.replace('{text_prompt}', '{prompt}')!r}\n")

    def write(self, file: Path, names=old_names, **changes) -> dict:
        state = {**names(self.model), **self.head}
        state["lm_head.weight"] = torch.zeros(len(self.words), 32)
        state = {k: v.clone() for k, v in state.items()} | changes
        (torch.save if file.suffix == ".pth" else save_file)(
            {"model": state} if file.suffix == ".pth" else state, file
        )
        return {"checkpoint": str(file), "base": str(self.folder), "instruction": str(self.file)}

    def score(self, image: Tensor, prompt: str, **options) -> Tensor:
        picture = bytes_of(image)
        side = resized(picture.height, picture.width, 3136, 3136)
        processor = Qwen2VLImageProcessorPil(do_resize=False)
        seen = processor([picture.resize(side[::-1], 3)], return_tensors="pt")
        tokens = len(seen["pixel_values"]) // 4
        text = chat("<|image_pad|>" * tokens, self.text.replace("{text_prompt}", prompt))
        grid = seen["image_grid_thw"][0].tolist()
        found = states(
            self.model, self.words, text, "<|image_pad|>", grid, seen["pixel_values"], **options
        )
        ids = self.words(text, add_special_tokens=False)["input_ids"]
        x = found[ids.index(self.words.convert_tokens_to_ids(REWARD))]
        for place in (0, 3, 5):
            x = x.relu() if place else x
            x = self.head[f"rm_head.{place}.weight"] @ x + self.head[f"rm_head.{place}.bias"]
        return x[0]


PROMPTS = ["a red ball", "", "two cats {braces} on a table " * 3]


def test_hpsv3_is_its_second_computation(tmp_path, monkeypatch, small_images):
    hps, media = Hps(tmp_path, monkeypatch), pixels(3, 40, 72)
    wanted = torch.stack([hps.score(i, p) for i, p in zip(media, PROMPTS, strict=True)])
    assert wanted.std() > 1e-2
    for file, names in (("a.safetensors", old_names), ("b.pth", new_names)):
        reward = load("hpsv3", **hps.write(tmp_path / file, names), **CPU)
        score = reward(samples(media, PROMPTS))
        torch.testing.assert_close(score, wanted, **CLOSE)
        alone = torch.cat([reward(samples(media[i : i + 1], PROMPTS[i : i + 1])) for i in range(3)])
        torch.testing.assert_close(alone, score, rtol=0, atol=1e-5)
    # the positions of the image grid are others, and give another score
    tokens = 4
    text = chat("<|image_pad|>" * tokens, hps.text.replace("{text_prompt}", PROMPTS[0]))
    ids = hps.words(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    kinds = (ids == hps.words.convert_tokens_to_ids("<|image_pad|>")).int()
    grid, _ = hps.model.get_rope_index(ids, kinds, image_grid_thw=torch.tensor([[1, 4, 4]]))
    square = pixels(1, 56, 56)[0]
    sequential, other = (
        hps.score(square, PROMPTS[0]),
        hps.score(square, PROMPTS[0], position_ids=grid),
    )
    assert (sequential - other).abs() > 1e-3
    torch.testing.assert_close(reward(samples(square[None], PROMPTS[:1]))[0], sequential, **CLOSE)


@pytest.mark.slow
def test_hpsv3_keeps_the_contract(tmp_path, monkeypatch, small_images):
    hps = Hps(tmp_path, monkeypatch)
    reward = load("hpsv3", **hps.write(tmp_path / "a.safetensors"), **CPU)
    check_contract(reward, images, tolerance=1e-4)
    with pytest.raises(ValueError, match=r"special tokens, such as <\|Reward\|>"):
        reward(samples(pixels(1), [f"a cat {REWARD}"]))
    half = load("hpsv3", **hps.write(tmp_path / "a.safetensors"), device="cpu")
    assert half.reward.backbone.model.language_model.rotary_emb.inv_freq.dtype == torch.float32
    assert half.reward.head[0].weight.dtype == torch.float32
    media = pixels(3, 40, 72)
    assert (half(samples(media, PROMPTS)) - reward(samples(media, PROMPTS))).abs().max() < 0.2


def test_other_layouts_are_refused(tmp_path, monkeypatch):
    hps = Hps(tmp_path, monkeypatch)
    file, rows = tmp_path / "a.safetensors", len(hps.words)
    cases = [
        ({"rm_head.2.weight": torch.zeros(2, 2)}, r"expected a head rm_head\.0\.bias"),
        ({"rm_head.5.weight": torch.zeros(3, 8)}, r"with 2 outputs"),
        ({"film.0.weight": torch.zeros(1)}, "entries of another model: film.0.weight"),
        (
            {"model.embed_tokens.weight": torch.zeros(rows + 3, 32)},
            f"{rows + 3} rows; expected {rows}",
        ),
        ({"model.norm.weight": torch.zeros(31)}, r"is not a qwen2_vl of .* size mismatch"),
        ({"model.extra.weight": torch.zeros(31)}, r"Unexpected key.*extra\.weight"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            load("hpsv3", **hps.write(file, **change), **CPU)
    settings = hps.write(file)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"a\.safetensors cannot be read"):
        load("hpsv3", **settings, **CPU)


def test_the_text_of_hpsv3_is_known():
    assert (
        INSTRUCTION_TAIL
        == "\nPlease provide the overall ratings of this image: <|Reward|>\n\nEND\n"
    )
    assert (INSTRUCTION.length, INSTRUCTION.digest) == (2590, "f6ee57479d4e9eee")


TOKENS = ("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>")
R, ALPHA = 2, 6.0
CONFIG = {
    "data_config": {
        **{"fps": 2.0, "max_frame_pixels": 6272, "sample_type": "uniform", "meta_data": "x"},
        **{"eval_dim": ["VQ", "MQ", "TA"], "prompt_template_type": "detailed_special"},
        **{"num_frames": None},
    },
    "training_args": {"bf16": True},
    "model_config": {"output_dim": 3, "use_special_tokens": True, "model_name_or_path": "base"},
    "peft_lora_config": {"lora_r": R, "lora_alpha": ALPHA, "use_rslora": False},
    "inference_config": {
        **{"VQ_mean": 0.1, "VQ_std": 2.0, "MQ_mean": -0.2, "MQ_std": 0.5},
        **{"TA_mean": 0.3, "TA_std": 1.5},
    },
}


class Video:
    """A tiny VideoReward: the folder as released, wrapped by peft, and its score by hand."""

    def __init__(self, folder: Path, monkeypatch):
        monkeypatch.setattr("rewards.catalogue.videoalign.LEAST_PIXELS", 3136)
        self.folder, self.base = folder, base_folder(folder / "base")
        self.words = whole_tokenizer(self.base, TOKENS)
        self.model = tiny_model(self.base, len(self.words))
        rng = torch.Generator().manual_seed(7)
        self.head = torch.randn(3, 32, generator=rng) / 32**0.5
        parts = (f"Rate {token}\nEND\n\n" for token in TOKENS[:2])
        self.text = f"\n{''.join(parts)}Textual prompt - {{text_prompt}}\nRate {TOKENS[2]}\nEND\n"
        known(monkeypatch, VIDEO_INSTRUCTION, self.text)
        (folder / "text.txt").write_text(self.text)
        self.write(rng)

    def write(self, rng: torch.Generator) -> None:
        """The unmerged state; the model in memory gets the adapter added by hand."""
        wrapped = {"base_model.model.rm_head.weight": self.head}
        wrapped["base_model.model.lm_head.weight"] = torch.zeros(len(self.words), 32)
        for name, value in old_names(self.model).items():
            module, _, part = f"base_model.model.{name}".rpartition(".")
            linear = ".layers." in name and (".self_attn." in name or ".mlp." in name)
            wrapped[f"{module}.base_layer.{part}" if linear else f"{module}.{part}"] = value.clone()
            if linear and part == "weight":
                a = torch.randn(R, value.shape[1], generator=rng) / 8
                b = torch.randn(value.shape[0], R, generator=rng) / 8
                wrapped[f"{module}.lora_A.default.weight"] = a
                wrapped[f"{module}.lora_B.default.weight"] = b
                value += ALPHA / R * (b @ a)
        for step in (9, 100):
            (self.folder / f"checkpoint-{step}").mkdir()
        torch.save(wrapped, self.folder / "checkpoint-100" / "model.pth")
        (self.folder / "model_config.json").write_text(json.dumps(CONFIG))

    @property
    def settings(self) -> dict:
        own = {"checkpoint": str(self.folder), "instruction": str(self.folder / "text.txt")}
        return {**own, "base": str(self.base), "video_fps": 4, **CPU}

    def logits(self, video: Tensor, prompt: str) -> Tensor:
        """[3]: the i-th output at the i-th token, each in float64 by hand but for the network."""
        total = len(video)
        count = {12: 6, 4: 4}[total]
        frames = [(video[round(i * (total - 1) / (count - 1))] * 255).round() for i in range(count)]
        seen = torch.cat(
            [
                Qwen2VLImageProcessorPil(do_resize=False)([bytes_of(f / 255)], return_tensors="pt")[
                    "pixel_values"
                ]
                for f in frames
            ]
        ).view(count // 2, 2, -1, 3, 2, 196)
        pairs = torch.stack([seen[:, 0, :, :, 0], seen[:, 1, :, :, 1]], 3)  # frame by frame
        values = pairs.reshape(-1, 1176)
        grid = [count // 2, *(side // 14 for side in video.shape[-2:])]
        text = chat(
            "<|video_pad|>" * (len(values) // 4), self.text.replace("{text_prompt}", prompt)
        )
        found = states(self.model, self.words, text, "<|video_pad|>", grid, values)
        ids = self.words(text, add_special_tokens=False)["input_ids"]
        at = [ids.index(self.words.convert_tokens_to_ids(token)) for token in TOKENS]
        return (found[at] @ self.head.T).diagonal()


def videos(frames: int) -> Tensor:
    """Whole 8-bit values at a size that needs no resizing."""
    rng = torch.Generator().manual_seed(frames)
    return torch.randint(0, 256, (2, frames, 3, 56, 84), generator=rng) / 255


def test_videoalign_is_its_second_computation(tmp_path, monkeypatch):
    tiny = Video(tmp_path, monkeypatch)
    prompts, group = ["a red ball rolls", "cats"], torch.arange(2)
    long, short = videos(12), videos(4)
    mean, std = torch.tensor([0.1, -0.2, 0.3]), torch.tensor([2.0, 0.5, 1.5])
    reward = load("videoalign", **tiny.settings)
    for media in (long, short):
        raw = torch.stack([tiny.logits(v, p) for v, p in zip(media, prompts, strict=True)])
        given = Samples(media, prompts, group)
        assert raw.std() > 0.1
        torch.testing.assert_close(reward(given), ((raw - mean) / std).sum(1), **CLOSE)
    parts = {}
    for kind in ("visual_quality", "motion_quality", "text_alignment"):
        one = load("videoalign", kind=kind, normalise=False, **tiny.settings)
        parts[kind] = one(given)
        other = one(Samples(short, ["something else entirely"] * 2, group))
        assert torch.allclose(other, parts[kind], atol=1e-5) == (kind != "text_alignment")
    torch.testing.assert_close(torch.stack(list(parts.values()), 1), raw, **CLOSE)
    mixed = Samples([*long, *short], prompts * 2, torch.arange(4))
    alone = torch.cat([reward(mixed.take([i])) for i in range(4)])
    torch.testing.assert_close(reward(mixed), alone, rtol=0, atol=1e-4)


def test_videoalign_refuses_other_folders(tmp_path, monkeypatch):
    tiny = Video(tmp_path, monkeypatch)
    config = tmp_path / "model_config.json"

    def refused(message: str, **settings) -> None:
        with pytest.raises(ValueError, match=message):
            load("videoalign", **{**tiny.settings, **settings})

    for place, field, value, message in (
        (
            "data_config",
            "sample_type",
            "multi_pts",
            r"data_config\.sample_type: Input should be 'un",
        ),
        ("model_config", "output_dim", 2, r"model_config\.output_dim: Input should be 1 or 3"),
        ("model_config", "output_dim", 1, r"rm_head\.weight should have 1 rows, its `output_dim`"),
        ("peft_lora_config", "lora_r", 3, "the adapter of .* is missing or its rank is not 3"),
    ):
        config.write_text(json.dumps({**CONFIG, place: {**CONFIG[place], field: value}}))
        refused(message)
    config.write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "inference_config"}))
    reward = advice(
        "videoalign: {} has no inference_config; set normalise: false",
        lambda: load("videoalign", **tiny.settings),
        lambda: load("videoalign", normalise=False, **tiny.settings),
    )
    assert reward is not None
    config.write_text("[]")
    refused(r"model_config\.json is not a JSON object")
    config.write_text(json.dumps(CONFIG))
    (tmp_path / "checkpoint-200").mkdir()
    refused(r"checkpoint-200/model\.pth does not exist; an adapter alone")
    refused("has no model_config.json", checkpoint=str(tiny.base))
    refused("no such folder: nowhere", checkpoint="nowhere")
    monkeypatch.setattr("rewards.perception.hub.hub_silence", lambda _: "cannot be reached")
    refused("KwaiVGI/VideoReward could not be fetched", checkpoint=None)
    refused("videoalign: instruction: .* does not hold", instruction=str(config))
