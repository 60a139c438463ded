"""Low-rank adapters of any module (peft, arXiv:2106.09685): their initial values, their files, and
a switch that turns them off, so that a call costs as much as one of the base model."""

import re
from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from flowrl.errors import UserError
from flowrl.paths import find
from samplers.noise import generator

ADAPTER = "default"  # the name of the trained adapter in peft
ADAPTER_WEIGHTS = "adapter_model.safetensors"  # peft's own name
LENGTHS = "lora_magnitude_vector"  # peft's name of DoRA's lengths [out] of a weight's rows


def adapter_switch(roots: Iterable[nn.Module]) -> Callable[[bool], None] | None:
    """Return a function that switches all adapters of these modules on or off; None without
    adapters."""
    layers = [m for root in roots for m in root.modules() if isinstance(m, BaseTunerLayer)]
    if not layers:
        return None

    def switch(on: bool) -> None:
        for layer in layers:
            # peft's `enable_adapters` would also change which weights take a gradient
            layer._disable_adapters = not on  # pyright: ignore[reportPrivateUsage]

    return switch


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def begin_adapters(model: nn.Module, rank: int, seed: int) -> None:
    """Initialise new adapters: at least float32, A ~ N(0, 1 / rank^2), B = 0. A is
    keyed by the seed and the parameter's name; with DoRA also the lengths of rows."""
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            continue
        precise = torch.promote_types(parameter.dtype, torch.float32)
        parameter.data = parameter.data.to(precise)  # half precision would lose small steps
        parameter.requires_grad_(True)
        if ".lora_A." in name:
            draws = generator(seed, "lora", name)
            fresh = torch.empty(parameter.shape).normal_(std=1 / rank, generator=draws)
            parameter.data.copy_(fresh)
    begin_lengths(model)


def begin_lengths(model: nn.Module) -> None:
    """Set DoRA's lengths [out] to those of the weights' rows, as its layers compute them with their
    present adapters, so that a new adapter (B = 0) changes nothing.

    peft sets them in the weight's own type: in bfloat16 they would differ from what a call computes
    by up to 0.4 %.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        if ADAPTER in layer.lora_magnitude_vector:
            layer.lora_magnitude_vector[ADAPTER].update_layer(
                base_layer=layer.get_base_layer(),
                lora_A=layer.lora_A[ADAPTER].weight.detach(),
                lora_B=layer.lora_B[ADAPTER].weight.detach(),
                scaling=layer.scaling[ADAPTER],
            )


def has_lengths(names: Iterable[str]) -> bool:
    """Whether parameters of these names are of adapters with DoRA's lengths."""
    return any(f".{LENGTHS}." in name for name in names)


def save_adapters(model: Any, folder: Path) -> None:
    """Write files that `PeftModel.from_pretrained(base, folder)` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER)
    tensors = {f"base_model.model.{name}": t.contiguous() for name, t in state.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    in_order(model.peft_config[ADAPTER]).save_pretrained(str(folder))


def merge_language_adapters(model: Any) -> None:
    """Add a transformers model's adapters to its weights, in place, and remove them."""
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    model._hf_peft_config_loaded = False  # what `save_pretrained` asks


def in_order(config: PeftConfig) -> PeftConfig:
    """The same settings with sorted lists in place of sets, whose order differs between processes,
    so that the same run always writes the same bits."""
    ordered = copy(config)
    for name, value in vars(config).items():
        if isinstance(value, set):
            setattr(ordered, name, sorted(value))
    return ordered


def peft_adapter(source: str) -> tuple[LoraConfig, str]:
    """Settings of the adapters in a peft folder or hub repository, and the local folder. UserError
    for anything but LoRA or DoRA of a single rank."""
    place, at = "model.lora.from", str(find(source))
    try:
        config = PeftConfig.from_pretrained(at)
    except (ValueError, OSError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{place}: {source} has no peft adapter: {reason}") from error
    if (
        not isinstance(config, LoraConfig)
        or not isinstance(config.target_modules, list | set)
        or config.use_rslora
        or config.rank_pattern
        or config.alpha_pattern
        or config.modules_to_save
    ):
        raise UserError(
            f"{place}: {source} is not a plain LoRA of one rank, or trains other modules too: "
            "merge it into the model, and train new adapters"
        )
    return config, at


def refuse_full_weights(source: Path | str, adapters: bool) -> None:
    """UserError for a folder of full weights, `source`, that a model with adapters would load."""
    if adapters:
        raise UserError(
            f"{source} holds full weights, but the model has adapters: set model.lora: null"
        )


def load_adapters(model: Any, folder: Path | str, *, complete: bool = False) -> None:
    """Load files of `save_adapters`; the model must have adapters. UserError for other files and,
    with `complete`, for files without values for some of the adapters."""
    if not has_adapters(model):
        raise UserError(f"{folder} holds an adapter, but the model has none: set model.lora")
    prefix = "base_model.model."
    state = {k.removeprefix(prefix): v for k, v in load_peft_weights(str(folder)).items()}
    keys = set_peft_model_state_dict(model, state, adapter_name=ADAPTER)
    missing = [name for name in keys.missing_keys if ".lora_" in name]
    if keys.unexpected_keys or (complete and missing):
        raise UserError(f"{folder} holds an adapter for another model or rank")


def linear_targets(
    model: nn.Module,
    wanted: Iterable[str] | None,
    head: Any = None,
    outside: str | None = None,
) -> list[str]:
    """Name endings of the linear layers that get an adapter; None means all but the head.
    `outside`: a regular expression of names to exclude. GPT-2's linear layers are `Conv1D`, with
    transposed weights.

    UserError for a target that matches no layer."""
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and (outside is None or not re.fullmatch(outside, name))
    ]
    ends = sorted({name.rsplit(".", 1)[-1] for name in linears})
    for target in wanted or ():
        if not any(f".{name}".endswith(f".{target}") for name in linears):
            raise UserError(
                f"lora target {target!r} matches no linear layer of the model, which has "
                f"{', '.join(ends) or 'none'}"
            )
    return ends if wanted is None else list(wanted)
