"""Low-rank adapters (peft, arXiv:2106.09685) of named modules of a user's model."""

from collections.abc import Sequence

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from flowrl.errors import UserError
from flowrl.models.adapters import ADAPTER, begin_adapters, has_adapters, linear_targets


def add_own_lora(
    model: nn.Module,
    trained: Sequence[str],
    *,
    rank: int,
    alpha: int | float,
    targets: Sequence[str] | None,
    seed: int,
    dora: bool = False,
) -> None:
    """Freeze the model and add adapters to linear layers below the submodules `trained`, or below
    the model itself if that is empty. `targets` are names or name endings; None: all linear layers.

    UserError if no layer matches.
    """
    if has_adapters(model):
        raise UserError(
            "the model already has adapters: call add_lora once, on a model without any"
        )
    linear_targets(model, targets)  # names one that matches nothing
    chosen = [name for name in _linears(model, trained) if _chosen(name, targets)]
    if not chosen:
        raise UserError(
            "model.lora: the trained modules have no such linear layer, which adapters need: set "
            "model.lora: null (lora=False in Python) to train all weights"
        )
    model.requires_grad_(False)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        target_modules=chosen,
        init_lora_weights="gaussian",
        use_dora=dora,
    )
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    begin_adapters(model, rank, seed)
    model.eval()


def _linears(model: nn.Module, trained: Sequence[str]) -> list[str]:
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [n for n in linears if not trained or any(f"{n}.".startswith(f"{t}.") for t in trained)]


def _chosen(name: str, targets: Sequence[str] | None) -> bool:
    return targets is None or any(f".{name}".endswith(f".{target}") for target in targets)
