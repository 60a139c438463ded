"""MPS on tiny random weights, pickled as a whole module as published; no code of the file runs."""

import os
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPModel

from rewards import load
from rewards.catalogue.mps import CONDITION, gated, rotated
from rewards.perception.pickled_module import tensors_of
from tests.support.reward_contract import check_contract, images
from tests.support.tiny_rewards import (
    LIMIT,
    PROMPTS,
    SIDE,
    clip_folder,
    pixels,
    prepared,
    samples,
    tokenizer,
)

WIDTH, HEADS, SPREAD = 24, 2, 96
CPU = {"device": "cpu"}
CLOSE = {"rtol": 0, "atol": 2e-5}


def published() -> types.ModuleType:
    """Classes with the attributes of the authors', in a module of their name."""
    module = types.ModuleType("trainer.models.clip_model")

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(1 + 0.2 * torch.randn(WIDTH))
            self.register_buffer("bias", torch.zeros(WIDTH))

    def linear(into: int, out: int) -> nn.Linear:
        return nn.Linear(into, out, bias=False)

    class Residual(nn.Module):
        def __init__(self, **parts: nn.Module) -> None:
            super().__init__()
            self.fn = nn.Module()
            self.fn.norm = Norm()
            for name, part in parts.items():
                setattr(self.fn, name, part)

    class Whole(nn.Module):
        def __init__(self, clip: nn.Module) -> None:
            super().__init__()
            self.model, self.config = clip, clip.config
            self.cross_model = nn.Module()
            inner = HEADS * 64
            blocks = []
            for _ in range(2):
                ff = nn.Sequential(linear(WIDTH, 2 * SPREAD), nn.SiLU(), linear(SPREAD, WIDTH))
                cross = {"to_q": linear(WIDTH, inner), "to_kv": linear(WIDTH, 128), "ff": ff}
                cross |= {"to_out": linear(inner, WIDTH)}
                fused = linear(WIDTH, inner + 128 + 2 * SPREAD)
                out = nn.Sequential(nn.SiLU(), linear(SPREAD, WIDTH))
                own = {"fused_attn_ff_proj": fused, "attn_out": linear(inner, WIDTH), "ff_out": out}
                blocks.append(nn.ModuleList([Residual(**cross), Residual(**own)]))
                rotary = nn.Module()
                rotary.register_buffer("inv_freq", torch.ones(32))
                blocks[-1][1].fn.rotary_emb = rotary
            self.cross_model.layers = nn.ModuleList(blocks)

    for made in (Norm, Residual, Whole):
        made.__module__, made.__qualname__ = module.__name__, made.__name__
        setattr(module, made.__name__, made)
    return module


class Program:
    """Runs a command where the file is loaded as its authors do."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(folder of the CLIP, the pickled file, the module, the file that its program would make)."""
    folder = clip_folder(tmp_path_factory.mktemp("clip"))
    clip = CLIPModel.from_pretrained(folder).eval()
    module = published()
    torch.manual_seed(5)
    whole = module.Whole(clip).eval()
    mark = folder / "ran"
    whole.note = Program(f"touch {mark}")
    names = ("trainer", "trainer.models", module.__name__)
    sys.modules |= dict.fromkeys(names, module)
    try:
        torch.save(whole, folder / "MPS_overall_checkpoint.pth")
    finally:
        for name in names:
            del sys.modules[name]
    return folder, folder / "MPS_overall_checkpoint.pth", whole, mark


@torch.no_grad()
def by_hand(whole, image: Tensor, prompt: str, threshold: float) -> tuple[float, int]:
    """Heads one after the other, with torch's own attention; and the number of words that count."""
    clip, words = whole.model, tokenizer()
    ids = [
        words(t, padding="max_length", truncation=True, max_length=LIMIT)["input_ids"]
        for t in (prompt, CONDITION)
    ]
    read = clip.text_model(input_ids=torch.tensor(ids))
    text, condition = clip.text_projection(read.last_hidden_state)
    likeness = torch.stack([torch.stack([t @ c for c in condition]).max() for t in text])
    seen_words = likeness / likeness.max() > threshold
    states = clip.vision_model(pixel_values=prepared(image, SIDE)[None]).last_hidden_state
    x = clip.visual_projection(states)[0]
    for cross, own in whole.cross_model.layers:
        y = functional.layer_norm(x, (WIDTH,), cross.fn.norm.weight)
        k, v = cross.fn.to_kv(text)[seen_words].split(64, 1)
        heads = [
            functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
            for q in cross.fn.to_q(y).split(64, 1)
        ]
        value, gate = cross.fn.ff[0](y).split(SPREAD, 1)
        x = x + cross.fn.to_out(torch.cat(heads, 1)) + cross.fn.ff[2](value * functional.silu(gate))
        y = functional.layer_norm(x, (WIDTH,), own.fn.norm.weight)
        q, k, v, value, gate = own.fn.fused_attn_ff_proj(y).split(
            [HEADS * 64, 64, 64, SPREAD, SPREAD], 1
        )
        heads = [
            functional.scaled_dot_product_attention(turned(q)[None], turned(k)[None], v[None])[0]
            for q in q.split(64, 1)
        ]
        x = x + own.fn.attn_out(torch.cat(heads, 1))
        x = x + own.fn.ff_out[1](value * functional.silu(gate))
    end = clip.text_projection(read.pooler_output)[0]
    score = clip.logit_scale.exp() * (end @ x[0]) / end.norm() / x[0].norm()
    return float(score), int(seen_words.sum())


def turned(x: Tensor) -> Tensor:
    """Rotary positions by complex numbers."""
    steps = 10000 ** (-torch.arange(32) / 32)
    angles = torch.arange(len(x))[:, None] * steps
    pairs = torch.complex(x[:, :32], x[:, 32:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], 1)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.9, 0.01])
def test_the_score_is_its_second_computation(tiny, threshold):
    folder, file, whole, mark = tiny
    media = pixels(len(PROMPTS))
    found = [by_hand(whole, image, p, threshold) for image, p in zip(media, PROMPTS, strict=True)]
    wanted = torch.tensor([score for score, _ in found])
    assert wanted.std() > 1e-3
    assert threshold < 0.9 or min(count for _, count in found) < LIMIT, "the mask hides no word"
    own = {"checkpoint": str(file), "clip": str(folder), "threshold": threshold, **CPU}
    with pytest.warns(UserWarning, match=f"more than {LIMIT} tokens are truncated"):
        reward = load("mps", **own)
        score = reward(samples(media, PROMPTS))
        alone = [reward(samples(media[i : i + 1], [p])) for i, p in enumerate(PROMPTS)]
    torch.testing.assert_close(score, wanted, **CLOSE)
    torch.testing.assert_close(torch.cat(alone), score, rtol=0, atol=1e-5)
    assert not mark.exists(), "the file's program ran"


def test_safetensors_of_the_same_names_will_do(tiny, tmp_path):
    folder, file, _, _ = tiny
    state = tensors_of("mps", file)
    assert {"model.logit_scale", "cross_model.layers.1.0.fn.to_q.weight"} <= set(state)
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "mps.safetensors")
    given = samples(pixels(2), ["a red ball", "two cat"])
    one, other = (
        load("mps", checkpoint=str(path), clip=str(folder), **CPU)(given)
        for path in (file, tmp_path / "mps.safetensors")
    )
    assert one.tolist() == other.tolist()


@pytest.mark.slow
def test_the_contract_holds(tiny):
    folder, file, _, _ = tiny
    reward = load("mps", checkpoint=str(file), clip=str(folder), **CPU)
    check_contract(reward, images, tolerance=1e-5)


def test_other_files_are_refused(tiny, tmp_path: Path):
    folder, file, _, mark = tiny
    own = {"clip": str(folder), **CPU}
    (tmp_path / "cut.pth").write_bytes(file.read_bytes()[:5000])
    torch.save({"x": Program(f"touch {mark}")}, tmp_path / "other.pth")
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "script.pth"))
    state = tensors_of("mps", file)
    less = {k: v.contiguous() for k, v in state.items() if not k.endswith("attn_out.weight")}
    save_file(less, tmp_path / "less.safetensors")
    bare = {k: v.contiguous() for k, v in state.items() if k.startswith("model.")}
    save_file(bare, tmp_path / "bare.safetensors")
    for name, said in (
        ("none.pth", "no such file"),
        ("cut.pth", "cannot be read: it is cut off or damaged"),
        ("other.pth", "does not hold a torch module"),
        ("script.pth", "is a TorchScript program"),
        ("less.safetensors", "differs from MPS in 1.fn.attn_out.weight"),
        ("bare.safetensors", r"has no cross_model\.layers\.\* entries"),
    ):
        with pytest.raises(ValueError, match=said):
            load("mps", checkpoint=str(tmp_path / name), **own)
    assert not mark.exists()


def test_halves():
    x = torch.arange(4.0)[None]
    torch.testing.assert_close(gated(x), torch.tensor([[0.0, 1.0]]) * functional.silu(x[:, 2:]))
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(rotated(x), torch.stack([turned(each) for each in x]))
