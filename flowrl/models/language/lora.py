"""Low-rank adapters (peft, arXiv:2106.09685) of a language model, and weights on disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from flowrl.errors import UserError
from flowrl.models.policy import ADAPTER
from samplers.noise import generator

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"  # peft's own names


def add_text_lora(
    model: Any, *, rank: int, alpha: int | float, targets: Sequence[str] | None, seed: int
) -> None:
    """Freeze the model and add float32 adapters: A ~ N(0, 1 / rank^2), B = 0.

    A is keyed by the seed and the parameter's name. targets None: all linear layers but the head.
    Raises UserError for targets that match no layer.
    """
    if has_text_lora(model):
        raise UserError(
            "the model already has adapters: call add_lora once, on a model without any"
        )
    model.requires_grad_(False)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules=_targets(model, targets),
        init_lora_weights="gaussian",
        task_type="CAUSAL_LM",
    )
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        model.add_adapter(config, adapter_name=ADAPTER)
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
    model.eval()


def _targets(model: Any, wanted: Sequence[str] | None) -> list[str]:
    head = model.get_output_embeddings()
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    if wanted is None:
        return sorted({name.rsplit(".", 1)[-1] for name in linears}) if linears else []
    for target in wanted:
        if not any(f".{name}".endswith(f".{target}") for name in linears):
            ends = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linears}))
            raise UserError(
                f"lora target {target!r} matches no linear layer of the model, which has {ends}"
            )
    return list(wanted)


def has_text_lora(model: Any) -> bool:
    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def save_text_lora(model: Any, folder: Path) -> None:
    """Write files that `PeftModel.from_pretrained(base, folder)` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(model, adapter_name=ADAPTER)
    tensors = {f"base_model.model.{name}": t.contiguous() for name, t in state.items()}
    save_file(tensors, folder / WEIGHTS)
    model.peft_config[ADAPTER].save_pretrained(folder)


def load_text_lora(model: Any, folder: Path) -> None:
    """Load files of `save_text_lora` or `save_pretrained`; adapters must have been added before."""
    if (folder / WEIGHTS).is_file():
        if not has_text_lora(model):
            raise UserError(f"{folder} holds an adapter, but the model has none: set model.lora")
        prefix = "base_model.model."
        state = {k.removeprefix(prefix): v for k, v in load_peft_weights(str(folder)).items()}
        found = set_peft_model_state_dict(model, state, adapter_name=ADAPTER)
        if found.unexpected_keys:
            raise UserError(f"{folder} holds an adapter of another model or rank")
    elif (folder / "config.json").is_file():
        if has_text_lora(model):
            raise UserError(f"{folder} holds full weights: load them before adding adapters")
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
        model.load_state_dict(saved.state_dict())
    else:
        raise UserError(f"{folder} has no saved weights: neither {WEIGHTS} nor config.json")
