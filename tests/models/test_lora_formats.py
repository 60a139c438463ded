"""Adapters in ComfyUI's and kohya's key formats: the same changes of the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import single_file_utils
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn

from flowrl.errors import UserError
from flowrl.models.adapters import in_order
from flowrl.models.description import public_model
from flowrl.models.diffusers.lora import lora, lora_formats, lora_keys
from flowrl.models.diffusers.lora.lora_formats import (
    AdapterLayers,
    check_written,
    read_adapter,
    write_adapter,
)
from flowrl.models.diffusers.lora.lora_keys import original_layers
from flowrl.models.diffusers.policy import PipelinePolicy
from flowrl.paths import CONFIGS_FOLDER
from flowrl.settings.file.inherit import read_tree
from tests.support.advice import advice
from tests.support.tiny_pipelines import NAMED

DOUBLE = [
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.add_k_proj",
    "attn.add_v_proj", "attn.to_add_out", "ff.net.0.proj", "ff.net.2",
]  # fmt: skip


def trained(family: str, folder: Path, targets: list[str] | None = None) -> PipelinePolicy:
    """A tiny pipeline with an adapter whose every weight is random, saved by diffusers."""
    made = PipelinePolicy(NAMED[family].build(), call=NAMED[family].call)
    made.add_lora(rank=2, alpha=6, targets=targets, seed=0)
    with torch.no_grad():
        for i, p in enumerate(made.trainable().values()):
            p.normal_(generator=torch.Generator().manual_seed(i))
    made.save(folder)
    return made


def plain(made: PipelinePolicy) -> tuple[Any, nn.Module]:
    """The pipeline without adapters, and its denoiser."""
    made.pipe.unload_lora_weights()
    return made.pipe, made.denoisers[0]


def written(
    made: PipelinePolicy, folder: Path, form: Any
) -> tuple[AdapterLayers, Path, Any, nn.Module]:
    adapter = read_adapter(folder / lora.LORA_FILE)
    pipe, denoiser = plain(made)
    file = folder / f"{form}.safetensors"
    write_adapter(file, adapter, denoiser, form)
    assert check_written(file, adapter, denoiser, form) < 1e-6
    return adapter, file, pipe, denoiser


def loaded_changes(
    pipe: Any, denoiser: nn.Module, adapter: AdapterLayers
) -> dict[str, torch.Tensor]:
    """What diffusers adds to each weight after it has read a file: measured by fusing it."""
    before = {name: denoiser.get_submodule(name).weight.clone() for name in adapter}
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    return {name: denoiser.get_submodule(name).weight - before[name] for name in adapter}


@pytest.mark.parametrize("family", ["SD1.5", "SDXL", "FLUX.1", "Qwen-Image", "Wan 2.1"])
def test_diffusers_own_converter_reads_kohyas_format(family, tmp_path):
    """An independent reader: `load_lora_weights` of diffusers renames kohya's keys."""
    targets: list[str] | None = DOUBLE if family == "FLUX.1" else None
    if family == "FLUX.1":  # its reader knows single blocks at their published size alone
        targets = [f"transformer_blocks.{i}.{end}" for i in (0, 1) for end in DOUBLE]
        names = [n for n, _ in NAMED[family].build().transformer.named_modules()]
        targets = [t for t in targets if t in names]
    if family in ("SD1.5", "SDXL"):
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
    made = trained(family, tmp_path, targets)
    adapter, file, pipe, denoiser = written(made, tmp_path, "kohya")
    pipe.load_lora_weights(tmp_path, weight_name=file.name)
    for name, change in loaded_changes(pipe, denoiser, adapter).items():
        wanted = adapter[name].change()
        assert float(wanted.abs().max()) > 1
        torch.testing.assert_close(change.double(), wanted, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["SD3", "FLUX.1", "Wan 2.1", "Qwen-Image"])
def test_comfyui_finds_every_part_at_its_rows(family, tmp_path):
    """ComfyUI adds alpha / rank * B A to the original weight, of which diffusers' are rows."""
    made = trained(family, tmp_path)
    adapter, file, _, denoiser = written(made, tmp_path, "comfyui")
    tensors = load_file(file)
    assert all(key.startswith("diffusion_model.") for key in tensors)
    for layer in original_layers(denoiser, list(adapter), "comfyui"):
        name = f"diffusion_model.{layer.name}"
        a, b, alpha = (tensors[f"{name}.{x}"] for x in ("lora_A.weight", "lora_B.weight", "alpha"))
        whole, row = alpha / len(a) * (b @ a), 0
        for part in layer.parts:
            rows = denoiser.get_submodule(part).weight.shape[0]
            found = whole[row : row + rows].double()
            torch.testing.assert_close(found, adapter[part].change(), rtol=1e-4, atol=1e-4)
            row += rows
        assert row == len(whole)
    kohya = tmp_path / "kohya.safetensors"
    write_adapter(kohya, adapter, denoiser, "kohya")
    names = {key.removeprefix("diffusion_model.").split(".lora_A")[0] for key in tensors
             if "lora_A" in key}  # fmt: skip
    assert {f"lora_unet_{name.replace('.', '_')}.alpha" for name in names} <= load_file(
        kohya
    ).keys()


def converted(kind: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with the names of a model's original code, as diffusers' converter of single files
    names them."""
    return getattr(single_file_utils, CONVERTERS[kind])(dict(state))


CONVERTERS = {
    "SD3Transformer2DModel": "convert_sd3_transformer_checkpoint_to_diffusers",
    "Flux2Transformer2DModel": "convert_flux2_transformer_checkpoint_to_diffusers",
    "ZImageTransformer2DModel": "convert_z_image_transformer_checkpoint_to_diffusers",
    "LTXVideoTransformer3DModel": "convert_ltx_transformer_checkpoint_to_diffusers",
    "LTX2VideoTransformer3DModel": "convert_ltx2_transformer_to_diffusers",
    "WanTransformer3DModel": "convert_wan_transformer_to_diffusers",
}
BLOCKS = {  # one linear layer of each name that these models' blocks have
    "Flux2Transformer2DModel": [
        *(f"transformer_blocks.1.attn.{x}" for x in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"transformer_blocks.1.attn.{x}" for x in ("add_q_proj", "add_k_proj", "add_v_proj")),
        "transformer_blocks.1.attn.to_add_out", "transformer_blocks.1.ff.linear_in",
        "transformer_blocks.1.ff.linear_out", "transformer_blocks.1.ff_context.linear_in",
        "transformer_blocks.1.ff_context.linear_out", "single_transformer_blocks.0.attn.to_out",
        "single_transformer_blocks.0.attn.to_qkv_mlp_proj",
    ],
    "ZImageTransformer2DModel": [
        f"{blocks}.1.{name}"
        for blocks in ("layers", "noise_refiner", "context_refiner")
        for name in (
            "attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0",
            "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
        )
    ],
    "LTXVideoTransformer3DModel": [
        "transformer_blocks.1.attn1.to_q", "transformer_blocks.1.attn2.to_out.0",
        "transformer_blocks.1.ff.net.0.proj", "transformer_blocks.1.ff.net.2",
    ],
    "LTX2VideoTransformer3DModel": [
        "transformer_blocks.1.attn1.to_q", "transformer_blocks.1.audio_attn2.to_out.0",
        "transformer_blocks.1.video_to_audio_attn.to_k", "transformer_blocks.1.ff.net.2",
        "transformer_blocks.1.audio_ff.net.0.proj",
    ],
    "WanTransformer3DModel": [
        "blocks.1.attn1.to_q", "blocks.1.attn2.to_out.0", "blocks.1.attn2.add_k_proj",
        "blocks.1.ffn.net.0.proj", "blocks.1.ffn.net.2",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", BLOCKS)
def test_diffusers_own_converter_of_single_files_agrees(kind: str) -> None:
    """An independent table: weights under the names that we write become those of the layers that
    we say, row by row."""
    denoiser = type(kind, (nn.Module,), {})()
    state, rows = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for layer in original_layers(denoiser, BLOCKS[kind], "comfyui"):
        parts = [torch.randn(4, 6) for _ in layer.parts]
        rows |= {f"{name}.weight": part for name, part in zip(layer.parts, parts, strict=True)}
        state[f"{layer.name}.weight"] = torch.cat(parts)
    assert {f"{name}.weight" for name in BLOCKS[kind]} == rows.keys()
    found = converted(kind, state)
    assert found.keys() == rows.keys()
    assert all(torch.equal(found[name], rows[name]) for name in rows)


@pytest.mark.slow
def test_every_configuration_has_names_or_a_reason() -> None:
    """For each shipped model and tool: a name of each adapted layer, or the sentence that the tool
    has no such model."""
    refused = set()
    for path in sorted((CONFIGS_FOLDER / "models").glob("*.yaml")):
        model = read_tree(path)[0]["model"]
        denoiser = public_model(model["pipeline"]).first
        ends = lora.chosen_targets(denoiser, (model.get("lora") or {}).get("targets"))
        names = [
            name
            for name, module in denoiser.named_modules()
            if isinstance(module, nn.Linear) and f".{name}".endswith(tuple(f".{e}" for e in ends))
        ]
        for form in ("comfyui", "kohya"):
            try:
                layers = original_layers(denoiser, names, form)
                assert sum(len(layer.parts) for layer in layers) >= len(names) > 0
            except UserError as error:
                assert "is not a model of" in str(error), (path, error)
                refused.add((path.stem, form))
    assert refused == {
        ("cogvideox_5b", "comfyui"), ("cogvideox_5b", "kohya"), ("sana", "comfyui"),
        ("sana", "kohya"), ("ltx_video", "kohya"), ("ltx2", "kohya"), ("ltx2_3", "kohya"),
    }  # fmt: skip


def test_a_part_without_an_adapter_is_zeros(tmp_path):
    made = trained("SD3", tmp_path, ["attn.to_k"])
    adapter, file, _, denoiser = written(made, tmp_path, "comfyui")
    tensors = load_file(file)
    name = "diffusion_model.joint_blocks.0.x_block.attn.qkv"
    up, width = (
        tensors[f"{name}.lora_B.weight"],
        denoiser.transformer_blocks[0].attn.to_k.out_features,
    )
    assert up.shape == (3 * width, 2) and tensors[f"{name}.alpha"] == 6
    assert not up[:width].any() and up[width : 2 * width].all() and not up[2 * width :].any()
    assert len(adapter) * 3 == len(tensors)


def test_what_is_not_known_is_refused_by_name(tmp_path):
    made = trained("LTX-Video", tmp_path)
    adapter = read_adapter(tmp_path / lora.LORA_FILE)
    advice(
        "{} is not a model of {}: export with --formats diffusers",
        lambda: write_adapter(tmp_path / "x", adapter, plain(made)[1], "kohya"),
        lambda: diffusers_reads("LTX-Video", tmp_path),
    )
    folder = tmp_path / "sd3"
    other = trained("SD3", folder, ["norm1.linear"])
    adapter = read_adapter(folder / lora.LORA_FILE)
    advice(
        "the adapted layer {} of {} has no known name in {}: export with --formats diffusers",
        lambda: write_adapter(tmp_path / "x", adapter, plain(other)[1], "comfyui"),
        lambda: diffusers_reads("SD3", folder),
    )


def diffusers_reads(family: str, folder: Path) -> None:
    """`--formats diffusers` copies the file that training saved: diffusers loads all of it."""
    pipe = NAMED[family].build()
    pipe.load_lora_weights(folder, weight_name=lora.LORA_FILE)
    denoiser = pipe.unet if "unet" in pipe.components else pipe.transformer
    assert lora.has_lora({"": denoiser})


def test_layers_outside_the_attention_blocks_of_a_unet_are_diffusers_alone(tmp_path: Path) -> None:
    made = trained("SDXL", tmp_path, ["time_embedding.linear_1"])
    adapter = read_adapter(tmp_path / lora.LORA_FILE)
    advice(
        "the adapted layer {} is in no attention block, but for ComfyUI's and kohya's formats "
        "only names of attention blocks are known: export with --formats diffusers",
        lambda: write_adapter(tmp_path / "x", adapter, plain(made)[1], "kohya"),
        lambda: diffusers_reads("SDXL", tmp_path),
    )


def test_models_without_a_map_of_names_are_diffusers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trained("SD3", tmp_path)
    adapter = read_adapter(tmp_path / lora.LORA_FILE)
    monkeypatch.setattr(lora_keys, "RULES", {"comfyui": {}, "kohya": {}})
    advice(
        "the names of {}'s layers in {} are not known, only those of the models of flowrl's "
        "configurations (docs/export.md): export with --formats diffusers",
        lambda: write_adapter(tmp_path / "x", adapter, plain(made)[1], "kohya"),
        lambda: diffusers_reads("SD3", tmp_path),
    )


def test_reading_back_sees_a_wrong_file(tmp_path, monkeypatch: pytest.MonkeyPatch):
    made = trained("SD3", tmp_path, ["attn.to_q"])
    adapter, _, _, denoiser = written(made, tmp_path, "kohya")
    right: Callable[..., Any] = lora_formats.fused
    monkeypatch.setattr(
        lora_formats, "fused", lambda *x: right(*x)._replace(up=right(*x).up.roll(1, 0))
    )
    write_adapter(tmp_path / "wrong", adapter, denoiser, "kohya")
    with pytest.raises(UserError, match="differs from the adapter"):
        check_written(tmp_path / "wrong", adapter, denoiser, "kohya")


def test_the_order_of_a_set_is_not_in_the_file():
    names = ["to_v", "to_k", "to_q", "ff"]
    config = LoraConfig(target_modules=names)
    assert isinstance(config.target_modules, set)  # of strings: another order in every process
    assert in_order(config).to_dict() == config.to_dict() | {"target_modules": sorted(names)}
