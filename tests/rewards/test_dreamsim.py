"""DreamSim on tiny random towers in the published layout, by torch's own transformer layers."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from rewards import load
from tests.support.tiny_rewards import bytes_of, pixels, samples

WIDTH, SIDE, PATCH, DEPTH, R, ALPHA = 128, 32, 16, 2, 4, 0.5
NAMES = ("dino_vitb16", "clip_vitb16", "open_clip_vitb16")


def state_of(name: str, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng) / shape[-1] ** 0.5

    state = {"cls_token": made(1, 1, WIDTH), "pos_embed": made(1, 5, WIDTH)}
    state["patch_embed.proj.weight"] = made(WIDTH, 3, PATCH, PATCH)
    state["patch_embed.proj.bias"] = made(WIDTH)
    for i in range(DEPTH):
        sizes = {"attn.qkv": (3, 1), "attn.proj": (1, 1), "mlp.fc1": (4, 1), "mlp.fc2": (1, 4)}
        for layer, (rows, columns) in sizes.items():
            state[f"blocks.{i}.{layer}.weight"] = made(rows * WIDTH, columns * WIDTH)
            state[f"blocks.{i}.{layer}.bias"] = made(rows * WIDTH)
    norms = [f"blocks.{i}.norm{k}" for i in range(DEPTH) for k in (1, 2)] + ["norm"]
    for norm in norms + (["pos_drop"] if "clip" in name else []):
        state |= {f"{norm}.weight": 1 + made(WIDTH), f"{norm}.bias": made(WIDTH)}
    return state


class Tiny:
    """The folder of the zip, and its distance computed with `nn.TransformerEncoderLayer`."""

    def __init__(self, folder: Path, whole: bool = False):
        self.folder = folder
        rng = torch.Generator().manual_seed(9)
        self.states, self.proj, together = [], [], {}
        for number, name in enumerate(NAMES):
            state = state_of(name, number)
            self.states.append({k: v.clone() for k, v in state.items()})
            self.proj.append(torch.randn(WIDTH, 24, generator=rng) if number else None)
            if number:
                saved = {"state_dict": {**state, "proj": self.proj[-1]}}
                torch.save(saved, folder / f"{name}_pretrain.pth.tar")
            else:
                torch.save(state, folder / f"{name}_pretrain.pth")
            adapter = {}
            for i in range(DEPTH):
                a, b = (
                    torch.randn(R, WIDTH, generator=rng),
                    torch.randn(3 * WIDTH, R, generator=rng),
                )
                self.states[-1][f"blocks.{i}.attn.qkv.weight"] += ALPHA / R * (b @ a)
                for part, value in (("A", a), ("B", b)):
                    adapter[f"blocks.{i}.attn.qkv.lora_{part}.weight"] = value
            start = "base_model.model."
            together |= {f"{start}extractor_list.{number}.model.{k}": v for k, v in adapter.items()}
            if not whole:  # the first release wraps the blocks twice, so they are saved twice
                twice = {f"{start}{k}": v for k, v in adapter.items()}
                self.write(
                    f"{name}_lora", {f"{start}model.{k}": v for k, v in adapter.items()} | twice
                )
        if whole:
            self.write("ensemble_lora", together)

    def write(self, name: str, adapter: dict[str, Tensor]) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        torch.save(adapter, self.folder / name / "adapter_model.bin")
        config = {"r": R, "lora_alpha": ALPHA, "target_modules": ["qkv"], "lora_dropout": 0.3}
        (self.folder / name / "adapter_config.json").write_text(json.dumps(config))

    @torch.no_grad()
    def tower(self, number: int, image: Tensor) -> Tensor:
        state, clip = self.states[number], number > 0
        mean = [0.48145466, 0.4578275, 0.40821073] if clip else [0.485, 0.456, 0.406]
        std = [0.26862954, 0.26130258, 0.27577711] if clip else [0.229, 0.224, 0.225]
        seen = (image - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        eps = 1e-5 if clip else 1e-6
        cut = seen.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 0, 3, 4)
        x = cut.reshape(4, -1) @ state["patch_embed.proj.weight"].flatten(1).T
        x = torch.cat([state["cls_token"][0], x + state["patch_embed.proj.bias"]])
        x = x + state["pos_embed"][0]

        def norm(name: str, x: Tensor) -> Tensor:
            return functional.layer_norm(
                x, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], eps
            )

        def quick(x: Tensor) -> Tensor:
            return x / (1 + torch.exp(-1.702 * x))

        x = norm("pos_drop", x) if clip else x
        act = quick if number == 1 else functional.gelu
        for i in range(DEPTH):
            layer = nn.TransformerEncoderLayer(
                *(WIDTH, WIDTH // 64, 4 * WIDTH), dropout=0.0, activation=act,
                layer_norm_eps=eps, batch_first=True, norm_first=True,
            )  # fmt: skip
            renamed = {"self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj.": "attn.proj."}
            renamed |= {"linear1.": "mlp.fc1.", "linear2.": "mlp.fc2."}
            renamed |= {"norm1.": "norm1.", "norm2.": "norm2."}
            parts = [(n + p, o + p) for n, o in renamed.items() for p in ("weight", "bias")]
            layer.load_state_dict({new: state[f"blocks.{i}.{old}"] for new, old in parts})
            x = layer.train()(x[None])[0]  # training mode takes the plain path; there is no dropout
        return x[0] if not clip else norm("norm", x[:1])[0] @ self.proj[number]

    def embedding(self, image: Image.Image) -> Tensor:
        small = image.resize((SIDE, SIDE), Image.BICUBIC)
        flat = torch.tensor(list(small.tobytes())).view(SIDE, SIDE, 3).permute(2, 0, 1) / 255
        e = torch.cat([self.tower(number, flat) for number in range(3)])
        e = e / e.norm()
        return e - e.mean()


@pytest.mark.parametrize("whole", [False, True])
def test_dreamsim_is_its_second_computation(tmp_path, whole):
    tiny = Tiny(tmp_path, whole)
    media, others = pixels(3, 40, 56), pixels(2, 50, 30)
    for i, image in enumerate(others):
        bytes_of(image).save(tmp_path / f"{i}.png")
    bytes_of(media[2]).save(tmp_path / "2.png")
    meta = [{"reference": str(tmp_path / f"{i}.png")} for i in range(3)]
    given = samples(media, ["a"] * 3, meta)
    reward = load("dreamsim", folder=str(tmp_path), device="cpu")
    wanted = [
        functional.cosine_similarity(
            tiny.embedding(bytes_of(media[i])), tiny.embedding(bytes_of(others[i])), dim=0
        )
        for i in range(2)
    ]
    score = reward(given)
    torch.testing.assert_close(score, torch.stack([*wanted, torch.ones(())]), rtol=0, atol=2e-5)
    assert score[:2].max() < 0.999
    alone = torch.cat([reward(given.take([i])) for i in range(3)])
    torch.testing.assert_close(alone, score, rtol=0, atol=1e-5)


def test_other_layouts_are_refused(tmp_path):
    tiny = Tiny(tmp_path)

    def refused(message: str, **settings) -> None:
        with pytest.raises(ValueError, match=message):
            load("dreamsim", **{"folder": str(tmp_path), "device": "cpu", **settings})

    refused("no such folder: nowhere", folder="nowhere")
    first = tmp_path / "dino_vitb16_pretrain.pth"
    plain = torch.load(first)
    torch.save({"student": {"module.head.mlp.0.weight": torch.zeros(1)}}, first)
    refused(r"pretrain\.pth does not hold tensors; name the backbone's file, dino_vitbase16_pret")
    torch.save({**plain, "norm.extra": torch.zeros(1)}, first)
    refused(r"does not hold a ViT's weights: norm\.extra missing or unexpected; name the")
    torch.save(plain, tmp_path / "backbone.pth")
    load("dreamsim", folder=str(tmp_path), dino=str(tmp_path / "backbone.pth"), device="cpu")
    (tmp_path / "checkpoints").mkdir()
    torch.save(plain, tmp_path / "checkpoints" / "dino_vitbase16_pretrain.pth")
    load("dreamsim", folder=str(tmp_path), device="cpu")  # as the authors' package leaves it
    (tmp_path / "checkpoints" / "dino_vitbase16_pretrain.pth").unlink()
    refused(r"no such file: .*gone\.pth", dino=str(tmp_path / "gone.pth"))
    torch.save(plain, first)
    key = "base_model.model.model.blocks.0.attn.{}.lora_{}.weight"
    tiny.write("clip_vitb16_lora", {key.format("proj", p): torch.zeros(4, 4) for p in "A"})
    refused(r"the adapter of blocks\.0\.attn\.proj does not fit")
    tiny.write("clip_vitb16_lora", {"mlp.weight": torch.zeros(1)})
    refused(r"unexpected entry mlp\.weight")
    (tmp_path / "clip_vitb16_lora" / "adapter_model.bin").unlink()
    refused("clip_vitb16_lora is not a folder with an adapter")
