"""Adapters of denoisers whose pipeline class neither writes nor reads adapters.

What a pipeline's class offers says nothing of its model: peft adds adapters to linear layers of any
module. Their file has the names and the metadata of diffusers' other adapter files
(`transformer.LAYER.lora_A.weight`), so every reader of those reads it. Plain diffusers loads it
with `pipe.transformer.load_lora_adapter(FOLDER, weight_name=..., prefix="transformer")` where the
model has that method; for other models peft's own files stand beside it, which
`peft.PeftModel.from_pretrained(pipe.transformer, FOLDER/transformer)` loads.
"""

import inspect
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers.loaders.peft import PeftAdapterMixin
from peft import (
    LoraConfig,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from flowrl.errors import UserError
from flowrl.json_text import json_text
from flowrl.models.adapters import ADAPTER, in_order, save_adapters
from flowrl.models.diffusers.lora.lora_formats import METADATA
from flowrl.models.saved_weights import tensors_and_settings

A = ".lora_A.weight"


def add(denoiser: nn.Module, config: LoraConfig, adapter: str = ADAPTER) -> None:
    """Add adapters by the model's own method, or else by peft's."""
    if isinstance(denoiser, PeftAdapterMixin):
        denoiser.add_adapter(config, adapter_name=adapter)
    else:
        inject_adapter_in_model(config, denoiser, adapter_name=adapter)


def remove(denoiser: nn.Module) -> None:
    """Remove all adapters without adding them to the weights."""
    for name, module in list(denoiser.named_modules()):
        if isinstance(module, BaseTunerLayer):
            parent, _, child = name.rpartition(".")
            setattr(denoiser.get_submodule(parent), child, module.get_base_layer())
    if "peft_config" in vars(denoiser):
        del denoiser.peft_config
    if isinstance(denoiser, PeftAdapterMixin):
        denoiser._hf_peft_config_loaded = False


def merge(denoiser: nn.Module, scale: float, adapter: str) -> None:
    """Add an adapter, times a scale, to the weights, and remove it."""
    for module in denoiser.modules():
        if isinstance(module, BaseTunerLayer):
            module.scale_layer(scale)  # type: ignore[operator]
            module.merge(adapter_names=[adapter])
    remove(denoiser)


def save(denoisers: Mapping[str, nn.Module], folder: Path, file: str) -> None:
    """Write the trained adapters of all denoisers into one file."""
    tensors: dict[str, Tensor] = {}
    settings: dict[str, Any] = {}
    for name, denoiser in denoisers.items():
        weights = get_peft_model_state_dict(denoiser, adapter_name=ADAPTER)
        tensors |= {f"{name}.{key}": weight.contiguous() for key, weight in weights.items()}
        config: Any = denoiser.peft_config
        peft_settings = in_order(config[ADAPTER]).to_dict()
        settings |= {f"{name}.{key}": value for key, value in peft_settings.items()}
        if not isinstance(denoiser, PeftAdapterMixin):
            save_adapters(denoiser, folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    about = json_text(settings, indent=2, sort_keys=True)
    save_file(tensors, folder / file, metadata={"format": "pt", METADATA: about})


def load(denoisers: Mapping[str, nn.Module], file: Path, adapter: str, source: str) -> None:
    """Add the adapters of a file, which errors call `source`, to the denoisers. UserError for a
    tensor that has no layer, and for a file without adapters of any denoiser."""
    tensors, about = tensors_and_settings(file, METADATA, source)
    used = 0
    for name, denoiser in denoisers.items():
        prefix = f"{name}."
        weights = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        if not weights:
            continue
        settings = {k.removeprefix(prefix): v for k, v in about.items() if k.startswith(prefix)}
        layers = {
            key.removesuffix(A): len(value) for key, value in weights.items() if key.endswith(A)
        }
        linear_names = {
            n for n, module in denoiser.named_modules() if isinstance(module, nn.Linear)
        }
        if strange := sorted(set(layers) - linear_names):
            raise UserError(f"{source} has an adapter of {name}.{strange[0]}, which is no layer")
        config = _config(settings, layers, weights)
        inject_adapter_in_model(config, denoiser, adapter_name=adapter)
        if isinstance(denoiser, PeftAdapterMixin):
            denoiser._hf_peft_config_loaded = True
        result = set_peft_model_state_dict(denoiser, weights, adapter_name=adapter)
        if result.unexpected_keys:
            raise UserError(f"{source} has {result.unexpected_keys[0]}, which is no layer")
        used += len(weights)
    if used < len(tensors) or not used:
        raise UserError(
            f"of the {len(tensors)} tensors of {source}, {used} belong to "
            f"{', '.join(denoisers)}: it was made for another model"
        )


def _config(
    settings: Mapping[str, Any], layers: Mapping[str, int], tensors: Mapping[str, Tensor]
) -> LoraConfig:
    """The settings of a file, or without them those that its tensors show."""
    if settings:
        names = inspect.signature(LoraConfig).parameters
        return LoraConfig(**{key: value for key, value in settings.items() if key in names})
    rank = Counter(layers.values()).most_common(1)[0][0]
    other_ranks = {layer: layer_rank for layer, layer_rank in layers.items() if layer_rank != rank}
    return LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=sorted(layers),
        rank_pattern=other_ranks,
        alpha_pattern=other_ranks,
        use_dora=any("lora_magnitude_vector" in key for key in tensors),
    )
