"""Adapter files in diffusers', ComfyUI's and kohya's formats, written and read back.

    diffusers  transformer.LAYER.lora_A.weight, lora_B.weight, with alpha in the file's metadata
    comfyui    diffusion_model.ORIGINAL_LAYER.lora_A.weight, lora_B.weight, alpha; for UNets kohya's
               format
    kohya      lora_unet_ORIGINAL_LAYER.lora_down.weight, lora_up.weight, alpha, dots as underscores

An adapter changes its layer's weight by (alpha / rank) B A, with A [rank in] and B [out rank].
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.models.adapters import LENGTHS
from flowrl.models.diffusers.lora.lora_keys import OriginalLayer, original_layers
from flowrl.models.saved_weights import reading, tensors_and_settings
from flowrl.settings.command_line.arguments import KeyFormat

KEY_SUFFIXES = {"comfyui": ("lora_A", "lora_B"), "kohya": ("lora_down", "lora_up")}
METADATA = "lora_adapter_metadata"  # diffusers' name of the settings in a file


class AdapterLayer(NamedTuple):
    """Adapter of one layer: down [rank in], up [out rank]; it changes the weight by scale * up
    down."""

    down: Tensor
    up: Tensor
    scale: float

    def change(self) -> Tensor:
        """The adapter's change of the layer's weight [out in], in float64."""
        return self.scale * (self.up.double() @ self.down.double())


AdapterLayers = Mapping[
    str, AdapterLayer
]  # by the layer's name in diffusers, without the denoiser's


def read_adapter(file: Path) -> AdapterLayers:
    """Read a file that a diffusers pipeline's `save_lora_weights` wrote. UserError for what is more
    than products."""
    weights, metadata = tensors_and_settings(file, METADATA, "export")
    with reading(file, "export"):
        return _layers(file, weights, metadata)


def _layers(
    file: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> AdapterLayers:
    layers = dict[str, AdapterLayer]()
    for key, down in weights.items():
        if not key.endswith(".lora_A.weight"):
            continue
        part, _, layer = key.removesuffix(".lora_A.weight").partition(".")
        scale = _scale(metadata, part, layer, down.shape[0])
        layers[layer] = AdapterLayer(down, weights[f"{part}.{layer}.lora_B.weight"], scale)
    if any(LENGTHS in key for key in weights):
        raise UserError(
            "DoRA has no counterpart in kohya's tools, and ComfyUI divides by the lengths of the "
            "base's rows instead of the changed ones: export with --formats diffusers, or the "
            "whole model with --merged"
        )
    if not layers or 2 * len(layers) != len(weights):
        raise UserError(f"{file} is not an adapter of linear layers in diffusers' format")
    return layers


def _scale(metadata: Mapping[str, Any], part: str, layer: str, rank: int) -> float:
    """The factor of a layer's product: alpha / rank, or alpha / sqrt(rank) (rsLoRA,
    arXiv:2312.03732). Alpha may differ between layers; without one, diffusers takes the rank."""
    alpha = metadata.get(f"{part}.lora_alpha", rank)
    for pattern, layer_alpha in (metadata.get(f"{part}.alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):  # as peft matches it
            alpha = layer_alpha
            break
    return alpha / (rank**0.5 if metadata.get(f"{part}.use_rslora") else rank)


def write_adapter(file: Path, adapter: AdapterLayers, denoiser: nn.Module, form: KeyFormat) -> None:
    """Write the adapter in ComfyUI's or kohya's format. `denoiser` may be on the meta device.

    UserError for a model or layer without a known name in that format.
    """
    tensors = dict[str, Tensor]()
    for layer in original_layers(denoiser, list(adapter), form):
        name, (down, up) = _name(denoiser, layer.name, form), KEY_SUFFIXES[_keys(denoiser, form)]
        joined = fused(layer, adapter, denoiser)
        tensors[f"{name}.{down}.weight"] = joined.down.contiguous()
        tensors[f"{name}.{up}.weight"] = joined.up.contiguous()
        tensors[f"{name}.alpha"] = torch.tensor(joined.scale * len(joined.down))
    save_file(tensors, file, metadata={"format": "pt"})


def fused(layer: OriginalLayer, adapter: AdapterLayers, denoiser: nn.Module) -> AdapterLayer:
    """Join adapters into one for a fused layer: their ranks are concatenated, and `up` is
    block-diagonal.

    Parts of different scales get the scale 1, with theirs in `up`.
    """
    present = [adapter[part] for part in layer.parts if part in adapter]
    if len(layer.parts) == 1:
        return present[0]
    if len({adapted.scale for adapted in present}) > 1:
        scaled = {
            name: adapted._replace(up=adapted.scale * adapted.up, scale=1.0)
            for name, adapted in adapter.items()
        }
        return fused(layer, scaled, denoiser)
    scale = present[0].scale
    rank, heights = sum(len(adapted.down) for adapted in present), _heights(layer, denoiser)
    up, row, column = present[0].up.new_zeros(sum(heights), rank), 0, 0
    for part, height in zip(layer.parts, heights, strict=True):
        if part in adapter:
            block = adapter[part].up
            up[row : row + height, column : column + block.shape[1]] = block
            column += block.shape[1]
        row += height
    return AdapterLayer(torch.cat([adapted.down for adapted in present]), up, scale)


def _heights(layer: OriginalLayer, denoiser: nn.Module) -> list[int]:
    """Number of outputs of each part."""
    heights = list[int]()
    for part in layer.parts:
        module = denoiser.get_submodule(part)
        assert isinstance(module, nn.Linear), part
        heights.append(module.out_features)
    return heights


def _keys(denoiser: nn.Module, form: KeyFormat) -> KeyFormat:
    """Key names of a format; ComfyUI reads UNets in kohya's format."""
    return "kohya" if type(denoiser).__name__ == "UNet2DConditionModel" else form


def _name(denoiser: nn.Module, layer: str, form: KeyFormat) -> str:
    if _keys(denoiser, form) == "kohya":
        return f"lora_unet_{layer.replace('.', '_')}"
    return f"diffusion_model.{layer}"


def check_written(
    file: Path, adapter: AdapterLayers, denoiser: nn.Module, form: KeyFormat
) -> float:
    """Read a written file back and compare its weight changes layer by layer.

    Returns the largest difference, relative to a layer's largest change. UserError for a file that
    lacks a layer, has an extra one, or differs by more than rounding.
    """
    tensors, worst = load_file(file), 0.0
    down, up = KEY_SUFFIXES[_keys(denoiser, form)]
    for layer in original_layers(denoiser, list(adapter), form):
        name = _name(denoiser, layer.name, form)
        a, b = (tensors.pop(f"{name}.{side}.weight") for side in (down, up))
        read = AdapterLayer(a, b, tensors.pop(f"{name}.alpha").item() / len(a)).change()
        worst = max(worst, _difference(read, layer, adapter, denoiser))
    if tensors or not worst < 1e-6:
        raise UserError(
            f"{file} differs from the adapter by {worst:.1e} ({len(tensors)} extra keys)"
        )
    return worst


def _difference(
    read: Tensor, layer: OriginalLayer, adapter: AdapterLayers, denoiser: nn.Module
) -> float:
    parts: Sequence[Tensor] = [read]
    if len(layer.parts) > 1:
        parts = read.split(_heights(layer, denoiser))
    differences = []
    for part, rows in zip(layer.parts, parts, strict=True):
        wanted = adapter[part].change() if part in adapter else torch.zeros_like(rows)
        largest = max(float(wanted.abs().max()), torch.finfo(torch.float32).tiny)
        differences.append(float((rows - wanted).abs().max()) / largest)
    return max(differences)
