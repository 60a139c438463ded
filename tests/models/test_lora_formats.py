"""Adapters in ComfyUI's and kohya's key formats: the same changes of the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import nn

from flowrl.errors import UserError
from flowrl.models.adapters import in_order
from flowrl.models.diffusers.lora import lora, lora_formats
from flowrl.models.diffusers.lora.lora_formats import (
    AdapterLayers,
    check_written,
    read_adapter,
    write_adapter,
)
from flowrl.models.diffusers.lora.lora_keys import original_layers
from flowrl.models.diffusers.policy import PipelinePolicy
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
    for layer in original_layers(denoiser, list(adapter)):
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
    known = "formats are not known, only those of Stable Diffusion 1.5"
    with pytest.raises(UserError, match=rf"{known}.*Wan 2.1.*--formats diffusers"):
        write_adapter(tmp_path / "x", adapter, plain(made)[1], "kohya")
    made = trained("SD3", tmp_path / "sd3", ["norm1.linear"])
    adapter = read_adapter(tmp_path / "sd3" / lora.LORA_FILE)
    with pytest.raises(
        UserError, match=r"norm1\.linear of SD3Transformer2DModel has no known name"
    ):
        write_adapter(tmp_path / "x", adapter, plain(made)[1], "comfyui")


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
