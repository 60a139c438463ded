"""ImageReward on tiny random weights in the original code's names, against that code's formulas.

The two networks are written out here from BLIP's description (arXiv:2201.12086), with the names of
the released file: nothing of the reward or of transformers is in them.
"""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rewards import load
from rewards.checks.gradient_test import gradient_test
from rewards.checks.self_test import Prompts
from tests.support.reward_contract import check_contract, images, videos
from tests.support.tiny_rewards import PROMPTS, pixels, prepared, samples, tokenizer

SIDE, PATCH, WIDTH, HEADS, DEPTH = 16, 8, 128, 2, 2
LONGEST = 35
MEAN, STD = 0.16717362830052426, 1.0333394966054072


def random_state() -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng) / shape[-1] ** 0.5

    def linear(name: str, fan_in: int, fan_out: int) -> dict[str, Tensor]:
        return {f"{name}.weight": tensor(fan_out, fan_in), f"{name}.bias": tensor(fan_out)}

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": 1 + tensor(WIDTH), f"{name}.bias": tensor(WIDTH)}

    vision = {
        "cls_token": tensor(1, 1, WIDTH),
        "pos_embed": tensor(1, 1 + (SIDE // PATCH) ** 2, WIDTH),
        "patch_embed.proj.weight": tensor(WIDTH, 3, PATCH, PATCH),
        "patch_embed.proj.bias": tensor(WIDTH),
        **norm("norm"),
    }
    text = {
        "embeddings.position_ids": torch.arange(40)[None],
        "embeddings.word_embeddings.weight": tensor(30, WIDTH),
        "embeddings.position_embeddings.weight": tensor(40, WIDTH),
        **norm("embeddings.LayerNorm"),
    }
    for i in range(DEPTH):
        block, layer = f"blocks.{i}", f"encoder.layer.{i}"
        vision |= norm(f"{block}.norm1") | norm(f"{block}.norm2")
        vision |= linear(f"{block}.attn.qkv", WIDTH, 3 * WIDTH)
        vision |= linear(f"{block}.attn.proj", WIDTH, WIDTH)
        vision |= linear(f"{block}.mlp.fc1", WIDTH, 96) | linear(f"{block}.mlp.fc2", 96, WIDTH)
        for kind in ("attention", "crossattention"):
            for name in ("query", "key", "value"):
                text |= linear(f"{layer}.{kind}.self.{name}", WIDTH, WIDTH)
            text |= linear(f"{layer}.{kind}.output.dense", WIDTH, WIDTH)
            text |= norm(f"{layer}.{kind}.output.LayerNorm")
        text |= linear(f"{layer}.intermediate.dense", WIDTH, 80)
        text |= linear(f"{layer}.output.dense", 80, WIDTH) | norm(f"{layer}.output.LayerNorm")
    head = {}
    sizes = (WIDTH, 20, 12, 8, 6, 1)
    for place, fan_in, fan_out in zip((0, 2, 4, 6, 7), sizes, sizes[1:], strict=False):
        head |= linear(f"layers.{place}", fan_in, fan_out)
    unused = {"blip.vision_proj.weight": tensor(4, WIDTH), "blip.text_proj.bias": tensor(4)}
    named = (("blip.visual_encoder.", vision), ("blip.text_encoder.", text), ("mlp.", head))
    return {prefix + k: v for prefix, part in named for k, v in part.items()} | unused


class Original:
    """The networks, by the entries of a state."""

    def __init__(self, state: dict[str, Tensor]):
        self.state = state

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        weight, bias = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        return functional.layer_norm(x, (WIDTH,), weight, bias, eps)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(len(x), HEADS, -1).transpose(0, 1) for x in (q, k, v))
        weights = (q @ k.transpose(1, 2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    def see(self, image: Tensor) -> Tensor:
        vision = "blip.visual_encoder."
        weight, bias = (self.state[f"{vision}patch_embed.proj.{k}"] for k in ("weight", "bias"))
        patches = functional.conv2d(image, weight, bias, PATCH).flatten(1).T
        x = torch.cat([self.state[f"{vision}cls_token"][0], patches])
        x = x + self.state[f"{vision}pos_embed"][0]
        for i in range(DEPTH):
            block = f"{vision}blocks.{i}"
            qkv = self.linear(f"{block}.attn.qkv", self.norm(f"{block}.norm1", x, 1e-6))
            x = x + self.linear(f"{block}.attn.proj", self.attend(*qkv.chunk(3, -1)))
            inner = self.linear(f"{block}.mlp.fc1", self.norm(f"{block}.norm2", x, 1e-6))
            x = x + self.linear(f"{block}.mlp.fc2", functional.gelu(inner))
        return self.norm(f"{vision}norm", x, 1e-6)

    def read(self, ids: Tensor, seen: Tensor) -> Tensor:
        """Only real tokens: what is padded must not matter."""
        text = "blip.text_encoder."
        words = self.state[f"{text}embeddings.word_embeddings.weight"][ids]
        places = self.state[f"{text}embeddings.position_embeddings.weight"][: len(ids)]
        x = self.norm(f"{text}embeddings.LayerNorm", words + places, 1e-12)
        for i in range(DEPTH):
            layer = f"{text}encoder.layer.{i}"
            for kind, other in (("attention", None), ("crossattention", seen)):
                keys = x if other is None else other
                parts = [
                    self.linear(f"{layer}.{kind}.self.{name}", source)
                    for name, source in (("query", x), ("key", keys), ("value", keys))
                ]
                out = self.linear(f"{layer}.{kind}.output.dense", self.attend(*parts))
                x = self.norm(f"{layer}.{kind}.output.LayerNorm", out + x, 1e-12)
            inner = functional.gelu(self.linear(f"{layer}.intermediate.dense", x))
            out = self.linear(f"{layer}.output.dense", inner)
            x = self.norm(f"{layer}.output.LayerNorm", out + x, 1e-12)
        return x

    def score(self, image: Tensor, prompt: str) -> Tensor:
        ids = tokenizer(LONGEST)(prompt, truncation=True, return_tensors="pt")["input_ids"][0]
        x = self.read(ids, self.see(image))[0]
        for place in (0, 2, 4, 6, 7):
            x = self.linear(f"mlp.layers.{place}", x)
        return (x[0] - MEAN) / STD


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("imagereward")
    torch.save(random_state(), folder / "ImageReward.pt")
    tokenizer(512).save_pretrained(folder / "words")
    return folder / "ImageReward.pt", folder / "words"


def reward(files: tuple[Path, Path], **settings):
    checkpoint, words = files
    return load(
        "imagereward", checkpoint=str(checkpoint), tokenizer=str(words), device="cpu", **settings
    )


@pytest.mark.parametrize("shape", [(20, 28), (16, 16), (28, 20)])
def test_the_original_formulas_give_the_same(files, shape):
    prompts = [*PROMPTS, "a red ball on the table " * 10]
    media = pixels(len(prompts), *shape)
    original = Original(random_state())
    with torch.no_grad():
        wanted = torch.stack(
            [original.score(prepared(i, SIDE), p) for i, p in zip(media, prompts, strict=True)]
        )
    assert wanted.std() > 0.01
    with pytest.warns(UserWarning, match="more than 35 tokens are truncated"):
        score = reward(files)(samples(media, prompts))
    torch.testing.assert_close(score, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("factory", [images, videos])
def test_the_contract_holds(files, factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_contract(reward(files, batch=4), factory, tolerance=1e-5)


def test_the_gradient_is_that_of_the_plain_score(files):
    line = gradient_test("imagereward", reward(files, batch=16), Prompts(("a red ball",)))
    assert "rank correlation" in line and "finite differences" in line


def test_another_file_is_refused(files, tmp_path):
    torch.save({"mlp.layers.0.weight": torch.zeros(1, 1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt has no blip\.visual_encoder\."):
        reward((tmp_path / "other.pt", files[1]))


def test_entries_that_the_networks_do_not_know_are_left_out_and_missing_ones_refused(
    files, tmp_path
):
    checkpoint, words = files
    state, given = torch.load(checkpoint), samples(pixels(2), PROMPTS[:2])
    score = reward(files)(given)
    more = {"blip.visual_encoder.norm_pre.weight": torch.ones(3), **state}
    torch.save({"blip.text_encoder.pooler.bias": torch.ones(3), **more}, tmp_path / "more.pt")
    assert torch.equal(reward((tmp_path / "more.pt", words))(given), score)
    state.pop("blip.visual_encoder.norm.weight")
    torch.save(state, tmp_path / "less.pt")
    with pytest.raises(ValueError, match=r"no blip\.visual_encoder\.\* entries for post_layernorm"):
        reward((tmp_path / "less.pt", words))
