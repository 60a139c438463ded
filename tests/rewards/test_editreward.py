"""EditReward on a tiny random file in the published layout, computed a second time."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rewards import load
from rewards.catalogue.editreward import FOLLOWING_TEXT, QUALITY_TEXT
from rewards.perception.scalar_heads import INSTRUCTION_TAIL
from tests.support.tiny_qwen import (
    base_folder,
    head,
    new_names,
    old_names,
    tiny_model,
    whole_tokenizer,
)
from tests.support.tiny_rewards import bytes_of, pixels, samples

REWARD = "<|Reward|>"
TEXTS = ["\nDoes it follow?  \n{text_prompt}\n", "\nIs it good? \n{text_prompt}\n"]


class Edit:
    def __init__(self, folder: Path, monkeypatch):
        monkeypatch.setattr("rewards.catalogue.editreward.PIXELS", 56 * 56)
        self.folder, self.base = folder, base_folder(folder / "base", "qwen2_5_vl")
        self.words = whole_tokenizer(self.base, (REWARD,))
        self.model = tiny_model(self.base, len(self.words))
        self.heads = [head("", 32, 16, 8, 2)]
        self.heads.append({name: value.flip(0) for name, value in self.heads[0].items()})
        for published, text in zip((FOLLOWING_TEXT, QUALITY_TEXT), TEXTS, strict=True):
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            monkeypatch.setitem(published.__dict__, "length", len(text))
            monkeypatch.setitem(published.__dict__, "digest", digest)
        self.texts = folder / "prompts.py"
        self.texts.write_text(f"A = {TEXTS[0]!r}\nB = {TEXTS[1]!r}\n")
        self.write(new_names)

    def write(self, names) -> None:
        state = {**names(self.model), "lm_head.weight": torch.zeros(len(self.words), 32)}
        for i, one in enumerate(self.heads):
            state |= {f"rm_heads.head_{i}.{name}": value for name, value in one.items()}
        self.state = {name: value.clone().contiguous() for name, value in state.items()}
        save_file(self.state, self.folder / "model.safetensors")

    def load(self, **settings):
        own = {"checkpoint": str(self.folder), "base": str(self.base), "dtype": "float32"}
        own |= {"following": str(self.texts), "quality": str(self.texts), "device": "cpu"}
        return load("editreward", **{**own, **settings})

    @torch.no_grad()
    def score(self, source, edit, prompt: str, which: int) -> torch.Tensor:
        """One pass by raw calls: two vision blocks, sequential positions, one head."""
        processor = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=3136)
        seen = processor([bytes_of(source), bytes_of(edit)], return_tensors="pt")
        tokens = (seen["image_grid_thw"].prod(1) // 4).tolist()
        shown = "".join(f"<|vision_start|>{'<|image_pad|>' * n}<|vision_end|>" for n in tokens)
        text = TEXTS[which].replace("{text_prompt}", prompt) + INSTRUCTION_TAIL
        ids = self.words(
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            f"{shown}{text}<|im_end|>\n<|im_start|>assistant\n",
            add_special_tokens=False,
            return_tensors="pt",
        )["input_ids"]
        features = self.model.get_image_features(seen["pixel_values"], seen["image_grid_thw"])
        vectors = self.model.get_input_embeddings()(ids)
        vectors[ids == self.words.convert_tokens_to_ids("<|image_pad|>")] = torch.cat(
            features.pooler_output
        )
        states = self.model.language_model(inputs_embeds=vectors).last_hidden_state[0]
        x = states[ids[0].tolist().index(self.words.convert_tokens_to_ids(REWARD))]
        one = self.heads[which]
        for place in (0, 3, 5):
            x = one[f"{place}.weight"] @ (x.relu() if place else x) + one[f"{place}.bias"]
        return x[0]


def test_editreward_is_two_passes_through_two_heads(tmp_path, monkeypatch):
    tiny = Edit(tmp_path, monkeypatch)
    edits, sources = pixels(3, 40, 72), pixels(2, 60, 50)
    prompts = ["make it red", "a hat", "nothing"]
    for i, image in enumerate(sources):
        bytes_of(image).save(tmp_path / f"{i}.png")
    meta = [{"source": str(tmp_path / f"{i}.png")} for i in (0, 1)] + [{}]
    wanted = torch.stack(
        [
            torch.stack([tiny.score(sources[i], edits[i], prompts[i], which) for which in (0, 1)])
            for i in (0, 1)
        ]
    )
    assert wanted.std() > 1e-2
    rules = {"mean": wanted.mean(1), "min": wanted.amin(1), "sum": wanted.sum(1)}
    rules |= {"following": wanted[:, 0], "quality": wanted[:, 1]}
    given = samples(edits, prompts, meta)
    for kind, score in rules.items():
        found = tiny.load(kind=kind)(given)
        torch.testing.assert_close(found[:2], score, rtol=0, atol=2e-4)
        assert found[2].isnan()
    reward = tiny.load()
    alone = torch.cat([reward(given.take([i])) for i in range(3)])
    torch.testing.assert_close(reward(given), alone, rtol=0, atol=1e-5, equal_nan=True)
    tiny.write(old_names)
    torch.testing.assert_close(tiny.load()(given), alone, rtol=0, atol=1e-5, equal_nan=True)
    with pytest.raises(ValueError, match="row 3 of the prompts lacks the column 'source'"):
        reward.check_prompts(prompts, meta)


def test_other_releases_are_refused(tmp_path, monkeypatch):
    tiny = Edit(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        tiny.load(checkpoint=str(tiny.base))
    with pytest.raises(ValueError, match="the file is not a qwen2_vl of"):
        tiny.load(base=str(base_folder(tmp_path / "other")))
    single = {n: v for n, v in tiny.state.items() if not n.startswith("rm_heads.head_1")}
    save_file(single, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected a head rm_heads\.head_1\.0\.bias"):
        tiny.load()
