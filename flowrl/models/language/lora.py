"""Low-rank adapters (peft, arXiv:2106.09685) of a language model, and weights on disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers.pytorch_utils import Conv1D

from flowrl.errors import UserError
from flowrl.models.adapters import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    begin_adapters,
    has_adapters,
    linear_targets,
    load_adapters,
    refuse_full_weights,
    save_adapters,
)
from flowrl.models.peft_version import check_peft


def add_text_lora(
    model: Any,
    *,
    rank: int,
    alpha: int | float,
    targets: Sequence[str] | None,
    seed: int,
    dora: bool = False,
    outside: str | None = None,
) -> None:
    """Freeze the model and add adapters, initialised by `begin_adapters`.

    targets None: all linear layers but the head. outside: a regular expression of layers to
    exclude. Raises UserError for targets that match no layer.
    """
    if has_adapters(model):
        raise UserError(
            "the model already has adapters: call add_lora once, on a model without any"
        )
    check_peft()
    model.requires_grad_(False)
    ends = linear_targets(model, targets, model.get_output_embeddings(), outside)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules=ends,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        exclude_modules=outside,
        init_lora_weights="gaussian",
        use_dora=dora,
        task_type="CAUSAL_LM",
    )
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        model.add_adapter(config, adapter_name=ADAPTER)
    begin_adapters(model, rank, seed)
    model.eval()


def load_text_weights(model: Any, folder: Path) -> None:
    """Load files of `save_adapters` or `save_pretrained`; adapters must have been added before."""
    if (folder / ADAPTER_WEIGHTS).is_file():
        load_adapters(model, folder)
    elif (folder / "config.json").is_file():
        refuse_full_weights(folder, has_adapters(model))
        saved = type(model).from_pretrained(folder, dtype=model.dtype)
        model.load_state_dict(saved.state_dict())
    else:
        raise UserError(f"{folder} has no saved weights: neither {ADAPTER_WEIGHTS} nor config.json")


def save_text_weights(model: Any, folder: Path, published: Any) -> None:
    """Save an adapter, or the whole model with its `published` generation config."""
    if has_adapters(model):
        save_adapters(model, folder)
        return
    current, model.generation_config = model.generation_config, published
    model.save_pretrained(folder)
    model.generation_config = current
