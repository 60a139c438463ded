"""The optimizers of `train.optimizer`."""

from collections.abc import Iterable

import torch
from torch import nn

from flowrl.processes.sharding import groups
from flowrl.settings import Train


def update_settings(optimizer: torch.optim.Optimizer, t: Train) -> None:
    """Apply the run file's settings to a restored optimizer state."""
    for group in optimizer.param_groups:
        group["betas"], group["weight_decay"] = t.betas, t.weight_decay


def build(t: Train, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if t.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit as kind  # type: ignore[import-not-found]  # noqa: N813
    else:
        kind = torch.optim.AdamW
    param_groups = [
        {"params": group} for group in groups(parameters) or [[]]
    ]  # of a model at rest, none
    return kind(param_groups, lr=t.lr, betas=t.betas, weight_decay=t.weight_decay)
